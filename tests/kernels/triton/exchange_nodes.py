"""Attention and expert nodes whose rows go by a device's exchange, in this process or in processes of their own."""

import time
from dataclasses import replace

import torch

from tests.kernels.triton.symm_nodes import (
    way,  # interprets kernels where there is no GPU, before they are imported
)

from afserve.comm.device_exchange.wire import open_link, open_port  # isort: skip
from afserve.comm.transport import Connecting, ListenSpec
from afserve.comm.transports import dist
from afserve.engine.build import build_attention_node, build_expert_bank, layout_for, spec_of
from afserve.engine.expert_node import ExpertNode
from afserve.errors import PeerLost
from afserve.kernels.ops import open_ops

CPU = torch.device("cpu")


def layout_of(source, config, plan):
    return layout_for(source, spec_of(source), config, plan.slots_per_node())


def expert_node(source, config, plan, index, attention, layout=None, recorder=None):
    """And its address."""
    layout = layout or layout_of(source, config, plan)
    end, address = dist.listen(ListenSpec(index, attention, layout), way(index))
    bank = build_expert_bank(source, plan.held(index), layout.slots, ops=open_ops("cpu", 1))
    port = open_port(end, bank, CPU, recorder=recorder)
    return ExpertNode(port, bank, epoch=plan.epoch, longest_hold=0.0), address


def attention_node(source, config, plan, index, addresses, **how):
    layout = layout_of(source, config, plan)
    end = dist.connect(Connecting(dict(enumerate(addresses)), index, layout, 60.0), way(index))
    link = open_link(end, attention=index, layout=layout, placement=plan, **how)
    return build_attention_node(source, config, link, ops=open_ops("cpu", 1)), link


def serve_expert(source, config, plan, index, attention, pipe):
    """Until the pipe says something; then how many layers the device answered by itself."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        node, address = expert_node(source, config, plan, index, attention)
        pipe.send(address)
        while not pipe.poll():
            try:
                if not node.poll():
                    node.wait(0.002)
            except PeerLost:
                continue
        pipe.send(node._port.exchanged)
        node.close()


def run_together(fronts, experts, wanted, between=lambda steps: None, seconds=120.0):
    """Tokens by request. Attention nodes take requests in turn; `experts` are those of this process."""
    for number, request in enumerate(wanted):
        fronts[number % len(fronts)].submit(request)
    said, steps, until = {}, 0, time.monotonic() + seconds
    while any(node.busy for node in fronts):
        assert time.monotonic() < until, "it takes too long"
        for node in fronts:
            for event in node.step():
                assert event.error is None, event.error
                said.setdefault(event.handle, []).extend(event.token_ids)
            if node.under_way:
                node.wait(0.001)
        for expert in experts:
            expert.poll()
        steps += 1
        between(steps)
    return [said[request.handle] for request in wanted]


def exchanging(config):
    return replace(config, device_exchange=True)
