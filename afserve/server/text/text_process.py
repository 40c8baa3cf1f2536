"""A process that prepares requests for a gateway: bodies in, prepared requests out, within CPU time and memory.

`python -m afserve.server.text.text_process PARENT`; it reads frames from its input and answers each on its output.
What runs too long or takes too much ends this process, never the gateway, which starts another one.
"""

import gc
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from typing import BinaryIO

from afserve.errors import AfserveError
from afserve.grammars.grammar import Compiler
from afserve.kinship import die_with_parent
from afserve.server.bodies.prepared import Computed, to_bytes
from afserve.server.bodies.sampling import model_defaults
from afserve.server.text.kinds import BodyKind
from afserve.server.text.pictures import PictureReader
from afserve.server.text.prepare import Preparer, check_template
from afserve.server.text.preparers import Preparers
from afserve.server.text.prompt_tokens import TextModel
from afserve.tokens.chat_template import ChatTemplate
from afserve.tokens.tokenizer import Tokenizer, eos_ids

# In front of a body: what it is for, how long it is. In front of an answer: how long it is.
QUESTION, LENGTH = struct.Struct("=BI"), struct.Struct("=Q")
MEMORY_EXIT = 3
_LARGE = 1 << 18
_STATM = "/proc/self/statm"


def main(parent: int) -> None:
    die_with_parent(parent, signal.SIGKILL)  # it may be stopped, and see no end of its input
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(source, sink)
    except MemoryError:
        os._exit(MEMORY_EXIT)
    except BrokenPipeError:
        os._exit(0)


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    setup = json.loads(_frame(source)[1])
    seconds = setup["seconds"]
    try:
        models = [TextModel(**model) for model in setup["models"]]
        preparers = _preparers(models, seconds, setup["mib"])
    except AfserveError as error:
        _send(sink, to_bytes(error))
        return
    _send(sink, to_bytes(Computed(b"")))
    while (frame := _frame(source))[0]:
        kind, body = frame
        signal.setitimer(signal.ITIMER_PROF, seconds)
        gc.disable()  # JSON has no cycles, and looking for them takes eight times as long as reading a large body
        answer = _answer(preparers, BodyKind(kind), body)
        gc.enable()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(sink, answer)
        if len(body) > _LARGE:
            del body, frame, answer
            gc.collect()


def _preparers(models: Sequence[TextModel], seconds: float, mib: int) -> Preparers:
    """Tokenizers take what they take; each template, which is a program, is compiled and tried within the limits."""
    tokenizers = [Tokenizer.from_folder(model.folder) for model in models]
    readers = [PictureReader.from_folder(m.folder, t) for m, t in zip(models, tokenizers, strict=True)]
    _limit_memory(mib)
    all_of = zip(models, tokenizers, readers, strict=True)
    return Preparers([_preparer(model, tokenizer, reader, seconds) for model, tokenizer, reader in all_of])


def _preparer(model: TextModel, tokenizer: Tokenizer, pictures: PictureReader, seconds: float) -> Preparer:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    template = ChatTemplate.from_folder(model.folder)
    check_template(template)
    signal.setitimer(signal.ITIMER_PROF, 0)
    compiler = Compiler(model.folder, model.vocab_size, eos_ids(model.folder))
    defaults = model_defaults(model.folder)
    return Preparer(model, tokenizer, defaults, template, compiler=compiler, pictures=pictures)


def _limit_memory(mib: int) -> None:
    """`mib` beyond what this process has mapped now."""
    if not os.path.exists(_STATM):
        return
    with open(_STATM, encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(preparers: Preparers, kind: BodyKind, body: bytes) -> bytes:
    try:
        return to_bytes(preparers.prepare(kind, body))
    except AfserveError as error:
        return to_bytes(error)


def _frame(source: BinaryIO) -> tuple[int, bytes]:
    """(0, nothing) when the gateway has gone."""
    head = source.read(QUESTION.size)
    if len(head) < QUESTION.size:
        return 0, b""
    kind, size = QUESTION.unpack(head)
    return kind, source.read(size)


def _send(sink: BinaryIO, answer: bytes) -> None:
    sink.write(LENGTH.pack(len(answer)))
    sink.write(answer)
    sink.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
