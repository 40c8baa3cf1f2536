"""`afserve up`: everything on this machine, or a cluster from here, from flags to a served API and back to nothing.

Flags and their files are read here; the work is in launch, control and server.
"""

import click
from click.core import ParameterSource

from afserve.cli.limits import SERVER_FLAGS, server_options
from afserve.cli.options import config_file, existing_file
from afserve.config import (
    BLOCK_SIZE,
    DTYPES,
    EXPERT_DTYPES,
    FULL,
    LOAD_FORMATS,
    MAX_BLOCK_SIZE,
    MAX_WAITING,
    SAMPLES,
    WAITING,
    WIRE_DTYPES,
)


@click.command()
@click.option(
    "--model", default="nano", show_default=True, help="Bundled name, checkpoint folder, or Hugging Face id."
)
@click.option("--attention", type=int, metavar="A", help="Attention nodes.")
@click.option("--experts", type=int, metavar="F", help="Expert nodes.")
@click.option(
    "--micro-batches",
    default="auto",
    show_default=True,
    metavar="M",
    help="In flight per attention node, 1 to 4.",
)
@click.option("--colocated", is_flag=True, help="Experts inside the attention nodes: the baseline.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the API listens.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one."
)
@click.option("--kv-tokens", type=int, help="KV cache of each attention node, in tokens.")
@click.option("--max-model-len", type=int, help="Longest sequence, prompt and answer together.")
@click.option(
    "--block-size",
    default=BLOCK_SIZE,
    show_default=True,
    type=click.IntRange(1, MAX_BLOCK_SIZE),
    metavar="TOKENS",
    help="Tokens of a KV block; CPUs read multiples of 16 fastest.",
)
@click.option(
    "--prefix-caching/--no-prefix-caching",
    default=True,
    show_default=True,
    help="Keep blocks of finished requests for prompts that begin alike.",
)
@click.option(
    "--max-waiting",
    default=WAITING,
    show_default=True,
    type=click.IntRange(1, MAX_WAITING),
    metavar="N",
    help="Requests that may wait on an attention node; more are told to come again.",
)
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(DTYPES),
    help="auto: the checkpoint's own.",
)
@click.option(
    "--expert-dtype",
    default="auto",
    show_default=True,
    type=click.Choice(EXPERT_DTYPES),
    help="int8: a byte per weight of the routed experts, on CPUs.",
)
@click.option(
    "--wire-dtype",
    default="auto",
    show_default=True,
    type=click.Choice(WIRE_DTYPES),
    help="fp8: rows travel to expert nodes in e4m3 with a scale per 128 columns.",
)
@click.option(
    "--load-format",
    default="safetensors",
    show_default=True,
    type=click.Choice(LOAD_FORMATS),
    help="dummy: random weights.",
)
@click.option(
    "--verify",
    default=SAMPLES,
    show_default=True,
    type=click.Choice((SAMPLES, FULL)),
    help="How nodes' copies of the checkpoint are compared; full: all bytes.",
)
@click.option("--layers", type=int, metavar="N", help="With dummy weights: only the first N layers.")
@click.option(
    "--redundant-experts", default=0, show_default=True, metavar="R", help="Extra replicas per MoE layer."
)
@click.option(
    "--rebalance",
    metavar="WHEN",
    help="auto, off, or every so many SECONDS; auto with --redundant-experts.",
)
@click.option(
    "--record-routing", type=click.Path(dir_okay=False), help="Write routing counts here at the end."
)
@click.option(
    "--trace", type=click.Path(dir_okay=False), help="Write a Perfetto trace of this run here at its end."
)
@click.option("--threads", type=int, help="Compute threads of each node.")
@click.option(
    "--gateways",
    type=int,
    default=0,
    metavar="N",
    help="HTTP in N processes of its own, which share the port; 0 serves it in this one.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="cpu, cuda (a GPU for each node while there are enough) or cuda:N.",
)
@click.option(
    "--transport",
    default="auto",
    show_default=True,
    type=click.Choice(("auto", "shm", "tcp", "dist", "symm")),
    help="Between nodes: shm on one host, tcp or dist between hosts, symm between GPUs of one NVLink domain.",
)
@click.option(
    "--api-key-file", type=existing_file, help="Clients must send one of these keys (one per line)."
)
@click.option("--admin-key-file", type=existing_file, help="Keys for /admin and /status (one per line).")
@server_options
@click.option("--served-model-name", help="What clients call the model.")
@click.option(
    "--log-level",
    default="warning",
    show_default=True,
    type=click.Choice(("debug", "info", "warning", "error")),
)
@click.option(
    "--cluster", type=existing_file, metavar="FILE", help="Start what `afserve plan --cluster FILE` wrote."
)
@click.option(
    "--listen", metavar="ADDRESS[:PORT]", help="With --cluster: where nodes on other hosts join, one address."
)
@click.option(
    "--config",
    type=existing_file,
    expose_value=False,
    is_eager=True,
    callback=config_file,
    help="TOML with the same names.",
)
@click.pass_context
def up(ctx: click.Context, /, **flags: object) -> None:
    """Start everything on this machine, or a cluster from here, and serve the OpenAI API.

    What is not given is picked for the machine; the banner says what and why. With --cluster, nodes of hosts that
    are this machine start here, and a line to run is printed for every node of the others.
    """
    from afserve.launch.processes import NodeProcesses

    given = frozenset(n for n in flags if ctx.get_parameter_source(n) is not ParameterSource.DEFAULT)
    with NodeProcesses() as processes:  # imports torch beside what follows
        from afserve.launch.gateway import UpFlags, serve_here

        server = {name: flags.pop(name) for name in SERVER_FLAGS}
        serve_here(UpFlags(**flags, server=server, given=given), processes)  # type: ignore[arg-type]
