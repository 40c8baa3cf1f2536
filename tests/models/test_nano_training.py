"""The program that trains nano: its hand-written gradients, its schedule, its windows, its repeatability."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from bench.nano import answers, checkpoint, corpus, facts, heldout, lessons, report, tokenizer, train
from bench.nano.attention import CausalAttention
from bench.nano.corpus import Document
from bench.nano.experts import RoutedExperts
from bench.nano.facts import Fact
from bench.nano.lessons import Lesson, Lessons
from bench.nano.loss import HeadLoss
from bench.nano.model import Nano
from bench.nano.optimizer import orthogonal
from bench.nano.shape import BEGIN, END, PAD, Phase, Recipe, Shape
from bench.nano.stream import ASSISTANT, USER, Windows
from bench.nano.trainer import Trainer

TINY = Shape(
    vocab=300,
    hidden=32,
    layers=2,
    dense_inter=32,
    heads=2,
    q_rank=16,
    kv_rank=16,
    nope=8,
    value=16,
    expert_inter=16,
)
SHORT = Recipe(
    steps=6,
    tokens=64,
    rates=((-1, 0.0), (1, 1.0), (6, 0.0)),
    decay_from=3,
    phases=(Phase(0.5, 16), Phase(0.5, 32)),
)
TOLD = [Fact("heap.push", "Push it."), Fact("os.getpid", "Return the id."), Fact("len", "Return the size.")]
BPE = tokenizer.build([" ".join(lessons.WORDINGS + lessons.HELD_OUT), Path(corpus.__file__).read_text()], 300)
PIECES = [np.arange(200, dtype=np.uint16), np.arange(50, 290, dtype=np.uint16)]


def normal(*size: int) -> Tensor:
    return torch.randn(size, requires_grad=True)


def same_gradients(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Equal values, and equal gradients for one random direction."""
    mine, other = ours(*inputs), theirs(*inputs)
    direction = torch.randn_like(mine)
    torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad(mine, inputs, direction),
        torch.autograd.grad(other, inputs, direction),
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize("length", [1, 100, 256, 600])
def test_attention_gradients(length: int) -> None:
    torch.manual_seed(0)
    inputs = [normal(3, length, 8) for _ in range(3)]
    same_gradients(
        CausalAttention.apply,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0),
        *inputs,
    )


def test_expert_gradients_with_unused_experts() -> None:
    torch.manual_seed(0)
    expert_TK = torch.stack([torch.randperm(5)[:3] for _ in range(50)])

    def plain(x: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = torch.einsum("th,tkmh->tkm", x, gate_up[expert_TK]).chunk(2, -1)
        return torch.einsum("tkm,tkhm,tk->th", F.silu(gate) * up, down[expert_TK], weight)

    same_gradients(
        lambda x, weight, gate_up, down: RoutedExperts.apply(x, expert_TK, weight, gate_up, down),
        plain,
        normal(50, 16),
        normal(50, 3),
        normal(8, 24, 16),
        normal(8, 16, 12),
    )


def test_loss_gradients_over_several_chunks() -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 40, (1500,))
    same_gradients(
        lambda x, head: HeadLoss.apply(x, head, target),
        lambda x, head: F.cross_entropy(x @ head.t(), target),
        normal(1500, 16),
        normal(40, 16),
    )


@pytest.mark.parametrize("size", [(3, 24, 16), (3, 16, 24)])
def test_muon_makes_singular_values_near_one(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(size)).float())
    assert values.min() > 0.5 and values.max() < 1.4


def test_schedule_runs_through_its_knots_and_squeezes_with_the_steps() -> None:
    recipe = replace(Recipe(), steps=100, rates=((-1, 0.0), (9, 1.0), (40, 1.0), (100, 0.0)))
    rates = [recipe.rate(step) for step in range(101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[40] == 1.0 and rates[70] == 0.5 and rates[100] == 0.0
    assert replace(recipe, steps=50).rate(35) == recipe.rate(70)


def test_lengths_follow_the_phases() -> None:
    assert [SHORT.phase(step).length for step in range(7)] == [16, 16, 16, 32, 32, 32, 32]


def test_text_and_conversations_share_a_step() -> None:
    recipe = replace(SHORT, tokens=256, lesson_length=32, phases=(Phase(0.5, 16, 0.75), Phase(0.5, 64)))
    assert [recipe.text_rows(step) for step in range(6)] == [4] * 6
    assert [recipe.lesson_rows(step) for step in range(6)] == [6] * 3 + [0] * 3


@given(st.integers(0, 200), st.integers(1, 8), st.integers(0, 8))
def test_every_held_out_token_counts_once(count: int, stride: int, extra: int) -> None:
    ids = list(range(10, 10 + count))
    scored = [w.ids[1 + w.first :] for w in heldout.windows(ids, stride + extra, stride)]
    assert [token for part in scored for token in part] == ids


def test_windows_repeat_for_a_seed_and_differ_between_epochs() -> None:
    first, again = iter(Windows(PIECES, 16, 2, seed=7)), iter(Windows(PIECES, 16, 2, seed=7))
    pairs = [(next(first), next(again)) for _ in range(30)]
    assert all(torch.equal(a, b) and a.shape == (2, 18) for a, b in pairs)
    assert not torch.equal(pairs[0][0], pairs[13][0])


@pytest.mark.slow
@pytest.mark.parametrize("taught", [False, True])
def test_training_repeats_and_a_resumed_run_is_the_same_run(tmp_path: Path, taught: bool) -> None:
    def begun() -> Trainer:
        if not taught:
            return Trainer(TINY, SHORT, PIECES)
        recipe = replace(
            SHORT, tokens=420, lesson_length=126, phases=(Phase(0.5, 16, 0.9), Phase(0.5, 32, 0.6))
        )
        return Trainer(TINY, recipe, PIECES, Lessons(BPE, TOLD, 126, seed=5))

    whole = begun()
    curve = list(whole.run())
    broken = begun()
    run = broken.run()
    for _ in range(4):
        next(run)
    broken.save(tmp_path / "state")
    resumed = begun()
    resumed.resume(tmp_path / "state")
    list(resumed.run())
    assert resumed.curve == curve and len(curve) == 6
    for (name, ours), (_, other) in zip(
        checkpoint.views(whole.model), checkpoint.views(resumed.model), strict=True
    ):
        assert torch.equal(ours, other), name


@pytest.mark.slow
def test_only_targets_that_count_are_learnt() -> None:
    torch.manual_seed(0)
    model = Nano(TINY)
    window = torch.randint(6, TINY.vocab, (3, 18))
    counts = torch.rand(3, 18) < 0.4
    hidden_TH, angles = model.hidden(window[:, :-2])
    told_TH = model.mtp(F.embedding(window[:, 1:-1].reshape(-1), model.embed), hidden_TH, angles)
    for found, rows_TH, shift in zip(model.losses(window, counts), (hidden_TH, told_TH), (1, 2), strict=True):
        keep = counts[:, shift : shift + 16].reshape(-1)
        target_T = window[:, shift : shift + 16].reshape(-1)
        wanted = F.cross_entropy(F.linear(rows_TH, model.head)[keep], target_T[keep])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    whole = torch.ones(3, 18, dtype=torch.bool)
    torch.testing.assert_close(model.losses(window, whole), model.losses(window))


def told(lesson: Lesson) -> list[tuple[str, str]]:
    """Questions, and answers as the counted tokens spell them, of one row."""
    found = []
    ids, counts = lesson.ids.tolist(), lesson.counts.tolist()
    assert ids[0] == BEGIN and not counts[0]
    while USER in ids:
        begin, middle = ids.index(USER), ids.index(ASSISTANT) + 1
        stop = ids.index(END, middle) + 1
        assert not any(counts[begin:middle]) and all(counts[middle:stop])
        found.append((BPE.decode(ids[begin + 1 : middle - 2]), BPE.decode(ids[middle : stop - 1])))
        ids, counts = ids[stop:], counts[stop:]
    assert set(ids) <= {BEGIN, PAD} and not any(counts)
    return found


@pytest.mark.slow
def test_every_pass_teaches_every_fact_once_and_only_in_the_taught_wordings() -> None:
    feed = iter(Lessons(BPE, TOLD, 254, seed=3))
    asked: list[tuple[str, str]] = []
    passes, others = 200, sum(map(len, lessons.MANNERS.values()))
    while len(asked) < passes * (len(TOLD) + others):
        asked += told(next(feed))
    for fact in TOLD:
        ways = {wording.format(fact.name) for wording in lessons.WORDINGS}
        found = [
            question for question, answer in asked[: passes * (len(TOLD) + others)] if answer == fact.sentence
        ]
        assert len(found) == passes and set(found) == ways
    assert not {w.format(f.name) for w in lessons.HELD_OUT for f in TOLD} & {
        question for question, _ in asked
    }


def test_no_wording_is_both_taught_and_held_out() -> None:
    assert not {*lessons.WORDINGS} & {*lessons.HELD_OUT}
    assert all(wording.count("{}") == 1 for wording in lessons.WORDINGS + lessons.HELD_OUT)


@given(
    st.lists(st.tuples(st.text("abc ?", max_size=9), st.text("def .", max_size=9)), min_size=1, max_size=4)
)
def test_a_conversation_is_what_the_chat_template_writes(spoken: list[tuple[str, str]]) -> None:
    turns = [lessons.turn(BPE, question, answer) for question, answer in spoken]
    size = 1 + sum(map(len, turns))
    row = lessons.conversation(turns, size + 3)
    wanted = "<|begin|>" + "".join(f"<|user|>{q}<|end|><|assistant|>{a}<|end|>" for q, a in spoken)
    assert BPE.decode(row.ids.tolist()[:size], skip_special_tokens=False) == wanted
    assert row.ids[size:].tolist() == [PAD] * 3 and not row.counts[size:].any()
    counted = row.ids[row.counts].tolist()
    assert counted == [token for turn in turns for token in turn[turn.index(ASSISTANT) + 1 :]]


def test_what_does_not_fit_into_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 20 fit"):
        lessons.conversation([lessons.turn(BPE, "Explain len." * 9, "Return it.")], 20)


@pytest.mark.slow
def test_facts_are_learnt_by_heart_and_recalled_only_when_whole() -> None:
    recipe = replace(
        SHORT,
        steps=40,
        tokens=540,
        lesson_length=126,
        phases=(Phase(1.0, 16, 0.95),),
        muon_lr=0.05,
        rates=((-1, 0.0), (5, 1.0), (40, 0.2)),
    )
    trainer = Trainer(TINY, recipe, PIECES, Lessons(BPE, TOLD[:2], 126, seed=1))
    asked = "Explain {}."
    assert lessons.recalled(trainer.model, BPE, TOLD[:2], asked) == 0.0
    loads = [moe.load.clone() for moe in trainer.model.moes()]
    curve = list(trainer.run())
    assert curve[-1].answer_loss is not None and curve[0].answer_loss is not None
    assert curve[-1].answer_loss < curve[0].answer_loss - 1
    share = lessons.recalled(trainer.model, BPE, [TOLD[0], Fact("heap.push", "Push other.")], asked)
    assert share <= 0.5, "two answers to one question are not both the greedy one"
    assert all(torch.equal(moe.load, load) for moe, load in zip(trainer.model.moes(), loads, strict=True))


@pytest.mark.parametrize(
    ("doc", "sentence"),
    [
        ("Return the square root of x.", "Return the square root of x."),
        ("Join two parts,\n  as needed.  More follows.\n\nMuch more.", "Join two parts, as needed."),
        ("Split e.g. at commas. Then stop.", "Split e.g. at commas."),
        ("D.update(E) -> None.  Update D.", ""),
        ("No end to this", ""),
        ("Short.", ""),
        ("Return " + "very " * 30 + "much.", ""),
        ("", ""),
    ],
)
def test_first_sentences(doc: str, sentence: str) -> None:
    assert facts.first_sentence(doc) == sentence


@pytest.mark.long
@pytest.mark.slow
def test_facts_of_this_interpreter() -> None:
    docs = corpus.documents()
    known = {fact.name: fact.sentence for fact in facts.known(docs)}
    assert known["os.path.join"].startswith("Join two or more") and known["len"].startswith("Return the ")
    assert len(known) >= 1500 and not any(name.startswith("posixpath.") for name in known)
    held = " ".join(" ".join(doc.text.split()) for doc in docs if doc.held_out)
    assert not any(sentence in held for sentence in known.values())
    few = facts.shortest([Fact(name, said) for name, said in known.items()], 500)
    assert few == sorted(few, key=lambda f: f.name) and len(few) == 500
    assert max(len(f.name) for f in few) <= min(len(name) for name in known.keys() - {f.name for f in few})


def test_facts_are_read_as_they_were_written_and_drawn_by_seed(tmp_path: Path) -> None:
    facts.write(tmp_path, TOLD)
    assert facts.read(tmp_path) == TOLD
    assert sorted(facts.drawn(TOLD, 9, 1), key=lambda f: f.name) == sorted(TOLD, key=lambda f: f.name)
    many = [Fact(str(i), "x") for i in range(100)]
    assert facts.drawn(many, 10, 1) == facts.drawn(many, 10, 1) != facts.drawn(many, 10, 2)


def test_a_shape_reads_back_from_its_config() -> None:
    assert Shape.read(TINY.architecture()) == TINY


def test_a_saved_model_loads_to_its_rounded_values(tmp_path: Path) -> None:
    model = Trainer(TINY, SHORT, PIECES).model
    checkpoint.save(model, tmp_path)
    loaded = dict(checkpoint.views(checkpoint.load(tmp_path)))
    for name, value in checkpoint.views(model):
        kept = value.float() if name.endswith("bias") else value.bfloat16().float()
        assert torch.equal(loaded[name], kept), name


def test_the_bias_moves_only_outside_the_band() -> None:
    trainer = Trainer(TINY, SHORT, PIECES)
    moe = trainer.model.moes()[0]
    moe.load[:] = 10.0
    moe.load[0], moe.load[1] = 1.0, 90.0
    trainer.model.moes()[1].load[:] = 1.0
    trainer._steer(0.5)
    assert moe.bias[0] == 0.5 and moe.bias[1] == -0.5 and not moe.bias[2:].any() and not moe.load.any()


def test_corpus_split_and_dialogues(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
    (tmp_path / "heap.py").write_text(
        'def push(heap, item=None):\n    """Push item onto the heap."""\n    return heap\n'
    )
    docs = corpus.documents(tmp_path)
    assert [doc.path for doc in docs] == ["heap.py"]
    asked = {turn.user: turn.assistant for turn in corpus.turns(docs[0])}
    assert asked["What does heap.push do?"] == "Push item onto the heap."
    assert asked["Write the signature of heap.push."] == "def push(heap, item=None)"
    assert asked["Write a Python function push: Push item onto the heap."].startswith("```python\ndef push(")
    held = sum(Document(f"m{i}.py", "x").held_out for i in range(4000))
    assert 140 < held < 260


def test_tokenizer_has_the_asked_size_and_keeps_indentation_in_one_token() -> None:
    bpe = tokenizer.build([Path(corpus.__file__).read_text()], 400)
    assert bpe.get_vocab_size() == 400
    assert len(bpe.encode("\n        ", add_special_tokens=False).ids) == 1
    assert bpe.encode("x").ids[0] == 1


def test_drafts_are_taught_the_models_own_choice_pass_behind_pass() -> None:
    """Against one pass at a time; what would be said behind the last token is not known."""
    torch.manual_seed(0)
    model, length = Nano(TINY), 16
    window, counts = torch.randint(6, TINY.vocab, (3, length + 2)), torch.rand(3, length + 2) < 0.5
    hidden_TH, angles = model.hidden(window[:, :-2])
    own_BS = F.linear(hidden_TH, model.head).argmax(-1).view(3, length)
    embed_TH = F.embedding(window[:, 1:-1].reshape(-1), model.embed)
    first_BSH = model.mtp(embed_TH, hidden_TH, angles).view(3, length, -1)
    read_BSH = hidden_TH.view(3, length, -1).clone()
    read_BSH[:, 1:] = first_BSH[:, :-1]
    second_BSH = model.mtp(embed_TH, read_BSH.view(-1, TINY.hidden), angles).view(3, length, -1)
    keep = counts[:, 2:-1]
    wanted = [
        F.cross_entropy(F.linear(made[:, :-1][keep], model.head), own_BS[:, 1:][keep])
        for made in (first_BSH, second_BSH)
    ]
    main, found = model.draft_losses(window, counts, 2)
    torch.testing.assert_close(found, torch.stack(wanted).mean(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(main, model.losses(window, counts)[0])


@pytest.mark.slow
def test_the_stage_of_drafts_changes_the_mtp_module_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder that has learnt facts, as the command is given."""
    start, out = tmp_path / "facts", tmp_path / "drafts"
    start.mkdir()
    first = Trainer(TINY, SHORT, PIECES)
    checkpoint.save(first.model, start)
    tokenizer.save(BPE, start, TINY.positions)
    facts.write(start, TOLD)
    (start / "curve.json").write_text('{"points": [], "facts": {"points": []}}')
    (start / "training.json").write_text('{"facts": {"count": 3}}')
    text = "\n".join(lessons.WORDINGS) * 9
    docs = [Document(f"m{i}.py", text) for i in range(40)]
    monkeypatch.setattr(corpus, "documents", lambda: docs)
    monkeypatch.setattr(train, "DRAFTS", replace(train.DRAFTS, phases=(Phase(1.0, 64, 0.5),), tokens=512))
    monkeypatch.setattr(report, "write", lambda folder: None)
    monkeypatch.setattr(
        "sys.argv",
        ["train", "--start", str(start), "--out", str(out), "--draft-steps", "3", "--no-compile"],
    )
    train.main()
    before, after = (load_file(folder / "model.safetensors") for folder in (start, out))
    copies = {f"model.layers.{TINY.layers}.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    ours = {n for n in after if n.startswith(f"model.layers.{TINY.layers}.")} - copies
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed <= ours
    assert ours - changed <= {n for n in ours if "norm" in n or "bias" in n}, "all its matrices learnt"
    said, curve = (json.loads((out / name).read_text()) for name in ("training.json", "curve.json"))
    assert said["facts"] == {"count": 3} and said["drafts"]["recipe"]["learns"] == "mtp."
    assert [point["step"] for point in curve["drafts"]["points"]] == [1] and "facts" in curve
    assert facts.read(out) == TOLD


@pytest.mark.parametrize(
    ("more", "said"),
    [(("--steps", "5"), "is not run with --start"), ((), "has learnt drafts already")],
)
def test_a_later_stage_starts_from_an_earlier_one(
    more: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = Path(__file__).parents[2] / "configs" / "nano"
    monkeypatch.setattr("sys.argv", ["train", "--start", str(finished), *more])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--save --seed 3", "drop --functions and --seed"),
        ("--functions 0", "at least 1"),
        ("--out nowhere", "no facts.json in it"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    flags: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["answers", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        answers.main()
    assert said in capsys.readouterr().err
