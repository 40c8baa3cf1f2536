"""Nodes of `symm` for its tests, also in processes of their own, which interpret the kernels where there is no GPU."""

import math
import traceback

import torch

from tests.kernels.triton.interpret import interpret

CUDA = torch.cuda.is_available()
if not CUDA:
    interpret()  # before the kernels are imported

from afserve.comm.device_exchange.ends import Boxes, Patience, SymmAttention, SymmExpert  # noqa: E402
from afserve.comm.device_exchange.region import Region  # noqa: E402
from afserve.comm.transport import Kind, ListenSpec, Parcel  # noqa: E402
from afserve.comm.transports import dist, symm  # noqa: E402
from afserve.errors import AfserveError, PeerLost  # noqa: E402
from tests.comm.host_driver import HostDriver  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
LONG = Patience() if CUDA else Patience(20_000, timed=False)


class Domain:
    """Attention and expert nodes whose memory is all here: on one GPU, or in a file that other processes map too."""

    def __init__(self, attention, experts, layout, patience=LONG, path=None):
        size = max(Region.of(kind, layout).size for kind in (Kind.DISPATCH, Kind.COMBINE))
        shape = 2, layout.micro_batches, attention, experts, size
        if path is None:
            self.memory = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
        else:
            flat = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=torch.uint8)
            self.memory = flat.view(shape)
        self.layout, self.patience = layout, patience
        self.attention_nodes, self.expert_nodes = attention, experts

    def _at(self, *index):
        return self.memory[index].data_ptr()

    def attention(self, a):
        boxes = [
            Boxes.at(
                [self._at(1, m, a, f) for f in range(self.expert_nodes)],
                [self._at(0, m, a, f) for f in range(self.expert_nodes)],
                DEVICE,
                self.memory,
            )
            for m in range(self.layout.micro_batches)
        ]
        return SymmAttention(self.layout, boxes, self.patience)

    def expert(self, f):
        boxes = [
            Boxes.at(
                [self._at(0, m, a, f) for a in range(self.attention_nodes)],
                [self._at(1, m, a, f) for a in range(self.attention_nodes)],
                DEVICE,
                self.memory,
            )
            for m in range(self.layout.micro_batches)
        ]
        return SymmExpert(self.layout, boxes, self.patience, torch.float32)


def compute(arrival, node, slots):
    """FFN of global slot s: (s + 1) * x; slots below 0 are skipped."""
    here_NK = arrival.slot_NK >= 0
    factor_N = (here_NK * arrival.weight_NK * (arrival.slot_NK + node * slots + 1)).sum(1)
    x_NH = torch.where(here_NK.any(1)[:, None], arrival.x_NH.float(), 0.0)
    return (factor_N[:, None] * x_NH).contiguous()


def serve(shared, f, turns, begun):
    """Expert node f of the `Domain` of these arguments, once all have `begun`."""
    domain = Domain(*shared)
    back = domain.expert(f)
    begun.wait(120)
    for _ in range(turns):
        for m in range(domain.layout.micro_batches):
            arrival = back.receive(m)
            back.answer(arrival, compute(arrival, f, domain.layout.slots))
    back.check()


def way(index=0):
    """On the GPU of that index, or on one that is shared; without any, in host memory."""
    if CUDA:
        return symm.on_gpu(torch.device("cuda", index % torch.cuda.device_count()))
    return symm.carriage(torch.device("cpu"), HostDriver(), chip=False)


def on_host(parcel):
    return Parcel(*(part.cpu().clone() if isinstance(part, torch.Tensor) else part for part in parcel))


def fill(source, target):
    for there, here in zip(target, source):
        if isinstance(there, torch.Tensor):
            there.copy_(here)


def remote_end(expert, attention, layout, pipe):
    if CUDA:
        torch.cuda.set_device(expert % torch.cuda.device_count())
    end, address = dist.listen(ListenSpec(expert, attention, layout), way(expert))
    pipe.send(("value", address))
    while True:
        word, *rest = pipe.recv()
        try:
            pipe.send(("value", act(end, word, rest)))
        except PeerLost as error:
            pipe.send(("lost", (str(error.peer), error.message)))
        except AfserveError as error:
            pipe.send(("error", error))
        except (RuntimeError, ValueError):  # shown in the process that asked
            pipe.send(("error", AssertionError(traceback.format_exc())))
        if word == "close":
            return


def act(end, word, rest):
    if word == "take":
        return on_host(end.take(*rest))
    if word == "post":
        box, parcel = rest
        fill(parcel, end.stage(box, parcel.header))
        return end.post(box)
    return getattr(end, word)(*rest)
