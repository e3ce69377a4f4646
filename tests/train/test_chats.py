"""Chats: what is read, what is refused, and packed sequences that are worth their chats alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from models import SMALL, in_float64, model_of
from norms import errors_by_name

from llamem import LoraConfig, Plan, TrainSettings
from llamem.runs import loss_fn, train
from llamem.text import Tokenizer
from llamem.train import load_chats, load_corpus
from llamem.train.chats import Chat, Chats, PackedBatches
from llamem.train.data import Corpus

ASK, ANSWER = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
CONFIG = SMALL.replace(n_layers=1, max_seq_len=64)


def some_chats(count, seed=0, longest=20):
    rng = np.random.default_rng(seed)

    def chat():
        size = int(rng.integers(3, longest))
        wrote = np.arange(size) >= rng.integers(1, size)
        return Chat(rng.integers(1, CONFIG.vocab_size, size).astype(np.uint32), wrote)

    return [chat() for _ in range(count)]


@pytest.mark.quick
def test_packed_chats_have_the_loss_and_gradients_of_each_alone():
    """Chats in one sequence do not see each other, and only the assistant's tokens count."""
    chats, model = some_chats(9), model_of(CONFIG)
    packed = PackedBatches(chats, 2, 32, vocab_size=CONFIG.vocab_size)
    assert packed.num_sequences < len(chats) and not packed.cut
    rows = [packed.batch_at(i, slice(row, row + 1)) for i in range(4) for row in range(2)][: packed.num_sequences]
    batch = tuple(np.concatenate(arrays) for arrays in zip(*rows, strict=True))
    assert sorted(batch[1][batch[1] != -100]) == sorted(np.concatenate([c.ids[1:][c.wrote[1:]] for c in chats]))
    graphdef, params = nnx.split(model)
    grad = jax.jit(jax.value_and_grad(lambda params, *batch: loss_fn(graphdef, params, *batch)))
    loss, grads = grad(params, *map(jnp.asarray, batch))
    counted = sum(int(chat.wrote[1:].sum()) for chat in chats)
    alone = [(0.0, jax.tree.map(jnp.zeros_like, params))]
    for chat in chats:  # filled up at the end, so that one program serves them all
        ids = np.zeros(33, np.int32)
        ids[: len(chat.ids)] = chat.ids
        targets = np.full(32, -100, np.int32)
        targets[: len(chat.ids) - 1] = np.where(chat.wrote[1:], chat.ids[1:].astype(np.int32), -100)
        share = int(chat.wrote[1:].sum()) / counted
        one, own = grad(params, jnp.asarray(ids[None, :-1]), jnp.asarray(targets[None]), jnp.zeros((1, 32), jnp.int32))
        alone.append((share * float(one), jax.tree.map(lambda g, share=share: share * g, own)))
    assert loss == pytest.approx(sum(value for value, _ in alone), rel=1e-6)
    total = jax.tree.map(lambda *g: sum(g), *(g for _, g in alone))
    assert max(errors_by_name(grads, total).values()) < 1e-5
    joined, _ = grad(params, *map(jnp.asarray, batch[:2]), jnp.zeros(batch[0].shape, jnp.int32))
    assert abs(float(joined) - float(loss)) > 1e-4  # as they would be if they saw each other


def test_what_is_longer_than_a_sequence_is_cut_and_told():
    chats = [Chat(np.arange(1, 31, dtype=np.uint32), np.arange(30) >= start) for start in (5, 25)]
    packed = PackedBatches(chats, 1, 16)
    assert packed.num_sequences == 1
    assert packed.cut == (
        "18 of the assistant's tokens are cut: 2 of 2 chats are longer than seq_len=16, and 1 of them have no answer "
        "before that and are left out."
    )
    with pytest.raises(ValueError, match="no chat has a token of the assistant among its first 4 tokens"):
        PackedBatches(chats, 1, 4)


@pytest.fixture(scope="module")
def llama3():
    return Tokenizer()


def test_llama3_chats_by_its_special_tokens(llama3, tmp_path):
    file = tmp_path / "chats.jsonl"
    lines = [{"messages": [ASK, ANSWER, ASK, ANSWER]}, {"prompt": "Name a colour.", "completion": "Blue."}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    chats = load_chats(file, llama3)
    assert len(chats.train) == len(chats.heldout) == 1
    texts = {llama3.decode(chat.ids): llama3.decode(chat.ids[chat.wrote]) for chat in (*chats.train, *chats.heldout)}
    head = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>".format
    two = "<|begin_of_text|>" + (head("user", "Two and two?") + head("assistant", "Four.")) * 2
    one = "<|begin_of_text|>" + head("user", "Name a colour.") + head("assistant", "Blue.")
    assert texts == {two: "Four.<|eot_id|>" * 2, one: "Blue.<|eot_id|>"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops", r"chats\.jsonl, line 2: no JSON"),
        ("[1, 2]", r"line 2: .* is no chat; expected \{\"messages\""),
        ('{"text": "prose"}', "line 2: .* is no chat"),
        ('{"messages": [{"role": "user"}]}', "line 2: .*messages.0.* Nothing was loaded"),
        (json.dumps({"messages": [ASK]}), "line 2: no turn of the assistant"),
        (json.dumps({"messages": [{**ASK, "content": "<|eot_id|>"}, ANSWER]}), "line 2: .*special token"),
        (json.dumps({"prompt": 3, "completion": "x"}), "line 2: .* is no chat"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_loaded(llama3, tmp_path, line, says):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [ASK, ANSWER]}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=says):
        load_chats(file, llama3)
    with pytest.raises(ValueError, match=r"holds JSON and not prose.*load_chats"):
        load_corpus(file, llama3, cache_dir=tmp_path)


SETTINGS = TrainSettings(
    steps=6, batch_size=4, seq_len=24, learning_rate=1e-2, warmup_steps=1, eval_every=3, eval_batches=1
)


def losses(run):
    return [(row["step"], row["loss"], row.get("val_loss"), row["grad_norm"]) for row in run.metrics]


def same(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_what_is_held_out_has_one_loss_in_batches_of_any_size(tmp_path):
    """The mean over all targets that count, by the reference in float64, of a run that changes nothing."""
    model, trained = model_of(CONFIG), tuple(some_chats(12))
    longer = [chat for chat in some_chats(60, 9) if len(chat.ids) > 13]  # each has a sequence of its own
    parts = [tuple(longer[:11]), tuple(longer[11:16])]

    def expected(chats):
        padded = [[np.pad(array, (0, 25 - len(array))) for array in chat] for chat in chats]
        ids, wrote = (np.stack(arrays) for arrays in zip(*padded, strict=True))
        return float(in_float64(reference.loss, CONFIG, model, ids[:, :-1], ids[:, 1:], wrote[:, 1:]))

    still = dataclasses.replace(SETTINGS, steps=1, learning_rate=1e-30, eval_batches=99)
    one, other = map(expected, parts)
    for size in (1, 3, 8):
        settings = dataclasses.replace(still, batch_size=size)
        run = train(CONFIG, Chats(trained, parts[0], CONFIG.vocab_size), settings, tmp_path / f"{size}", init=model)
        assert run.metrics[0]["val_loss"] == pytest.approx(one, rel=1e-6)
    data = [Chats(trained, part, CONFIG.vocab_size) for part in parts]
    lora = LoraConfig(ranks=(2, 3))  # which begin by adding nothing
    for size in (2, 6):
        settings = dataclasses.replace(still, batch_size=size)
        run = train(CONFIG, data, settings, tmp_path / f"adapters {size}", init=model, lora=lora)
        assert run.metrics[0]["val_loss_of_adapters"] == pytest.approx([one, other], rel=1e-6)


def test_adapters_train_on_chats_over_given_weights_and_go_on_bit_by_bit(tmp_path):
    """Two adapters with texts of their own; the base stays as it is; a snapshot in the middle leads to the same end."""
    model = model_of(CONFIG, scale=1.0)
    data = [Chats(tuple(some_chats(12, seed)), tuple(some_chats(3, seed + 9)), CONFIG.vocab_size) for seed in (1, 2)]
    before = jax.tree.map(np.asarray, nnx.state(model))
    given = {"init": model, "lora": LoraConfig(ranks=(2, 3)), "progress": False}
    whole = train(CONFIG, data, SETTINGS, tmp_path / "whole", **given)
    assert whole.finished and whole.adapters is not None and whole.adapters.count == 2
    assert whole.metrics[-1]["loss"] < whole.metrics[0]["loss"] and len(whole.metrics[0]["loss_of_adapters"]) == 2
    assert same(before, nnx.state(model)) and same(before, nnx.state(whole.model))
    early = dataclasses.replace(SETTINGS, snapshot_every=3)
    train(CONFIG, data, early, tmp_path / "parts", **given)
    (tmp_path / "parts" / "snapshots" / "6").rename(tmp_path / "gone")
    again = train(CONFIG, data, early, tmp_path / "parts", **given)
    assert losses(again) == losses(whole) and same(again.adapters, whole.adapters)
    alone = train(CONFIG, data[0], dataclasses.replace(SETTINGS, batch_size=2), tmp_path / "alone", **{
        **given, "lora": whole.adapters.select([0])
    })  # fmt: skip
    assert alone.metrics[0]["loss"] < whole.metrics[0]["loss"]  # given adapters are gone on with
    with pytest.raises(ValueError, match="belong to another run: weights under the adapters"):
        train(CONFIG, data, early, tmp_path / "parts", **{**given, "init": model_of(CONFIG, seed=5)})
    with pytest.raises(ValueError, match="belong to another run: adapters"):
        train(CONFIG, data, early, tmp_path / "parts", **{**given, "lora": LoraConfig((2, 3), target_modules=("q",))})


def test_tokens_beyond_the_table_are_named_with_their_tokenizer(llama3):
    chats = load_chats([{"prompt": "Name a colour.", "completion": word} for word in ("Blue.", "Red.")], llama3)
    said = r"the token 128009 of .*tokenizer.model, '<\|eot_id\|>', is beyond the model's table of 49,152 .* 128,256"
    with pytest.raises(ValueError, match=said):
        chats.batches(1, 32, 0, vocab_size=49_152)
    with pytest.raises(ValueError, match=r"the token 101 of .* is beyond the model's table of 100 entries"):
        Corpus(np.arange(102), np.arange(9), 1, 128_256, llama3).batches(1, 4, 0, vocab_size=100)


def test_what_is_cut_of_both_parts_is_told(tmp_path, capsys):
    parts = tuple(some_chats(12)), tuple(some_chats(4, 9))
    settings = dataclasses.replace(SETTINGS, steps=1, seq_len=9)
    train(CONFIG, Chats(*parts, CONFIG.vocab_size), settings, tmp_path / "run", progress=False)
    trained, held, *_ = capsys.readouterr().out.splitlines()
    assert trained.startswith(PackedBatches(parts[0], 4, 9).cut) and " of 12 chats" in trained
    assert held == f"Held out: {PackedBatches(parts[1], 4, 9).cut}" and " of 4 chats" in held


def test_a_given_model_goes_on_training_and_stays_as_it_was(tmp_path, capsys):
    model = model_of(CONFIG.replace(generation_config='{"eos_token_id": 2}'), scale=1.0)
    chats = Chats(tuple(some_chats(12)), tuple(some_chats(3, 9)), CONFIG.vocab_size)
    before = jax.tree.map(np.asarray, nnx.state(model))
    run = train(CONFIG, chats, SETTINGS, tmp_path / "one", init=model, progress=False)
    assert same(before, nnx.state(model)) and not same(before, nnx.state(run.model))
    assert run.model.config.generation_config == '{"eos_token_id": 2}' and "no token" not in capsys.readouterr().out
    settings = dataclasses.replace(SETTINGS, clip_norm=None)
    fewer = dataclasses.replace(chats, vocab_size=CONFIG.vocab_size - 7)
    plain = train(CONFIG, fewer, settings, tmp_path / "plain", init=model, progress=False)
    assert "has 101 entries and the tokenizer 94: the last 7 are no token." in capsys.readouterr().out
    host = Plan(weights="host", moments="host")
    streamed = train(CONFIG, chats, settings, tmp_path / "streamed", init=model, plan=host, progress=False)
    np.testing.assert_allclose([r["loss"] for r in plain.metrics], [r["loss"] for r in streamed.metrics], rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lora": LoraConfig(ranks=(2,))}, "train.lora=.* without init"),
        ({"init": "a/folder"}, "init='a/folder'.: expected a model, such as llamem.load_pretrained"),
        ({"init": model_of(SMALL)}, "weights are of another model than config says .n_layers: 3, not 1"),
        (
            {"init": model_of(CONFIG), "lora": LoraConfig(ranks=(2, 2, 2))},
            "batch_size=4 does not divide among 3 adapters",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(given, says, tmp_path, as_a_user):
    tokens = np.arange(2000, dtype=np.uint32) % 100
    with pytest.raises((ValueError, TypeError), match=says):
        train(CONFIG, Corpus(tokens, tokens, 1, 101), SETTINGS, tmp_path / "new", progress=False, **given)
    assert not (tmp_path / "new").exists()


def test_what_is_held_out_is_ones_own_or_nothing(llama3, tmp_path):
    records = [{"prompt": "Two?", "completion": f"{word}."} for word in ("One", "Two", "Three")]
    file = tmp_path / "held.jsonl"
    file.write_text(json.dumps({"prompt": "Two?", "completion": "Mine."}))
    answer = Tokenizer.decode
    for heldout, words in ((file, ["Mine."]), (records[:2], ["One.", "Two."]), (0, [])):
        chats = load_chats(records, llama3, heldout=heldout)
        for part, expected in ((chats.train, ["One.", "Two.", "Three."]), (chats.heldout, words)):
            assert [answer(llama3, c.ids[c.wrote]) for c in part] == [f"{word}<|eot_id|>" for word in expected]
    assert len(load_chats(records[:1], llama3, heldout=0).train) == 1
    for heldout in (0.2, True, 5):
        with pytest.raises(ValueError, match=r"or 0 for none. A share of the chats is heldout_fraction"):
            load_chats(records, llama3, heldout=heldout)
    with pytest.raises(ValueError, match=r"at least two, one of them to hold out .heldout=0 holds none"):
        load_chats(records[:1], llama3)


def test_equal_chats_are_all_trained_or_all_held_out(llama3):
    records = [{"prompt": "Two?", "completion": f"{n}."} for n in range(6) for _ in range(3)]
    for fraction in (0.01, 0.3, 0.6, 0.99):
        chats = load_chats(records, llama3, heldout_fraction=fraction)
        train, held = ({chat.ids.tobytes() for chat in part} for part in (chats.train, chats.heldout))
        assert train and held and not train & held and len(chats.train) + len(chats.heldout) == 18
    with pytest.raises(ValueError, match="has 1 different chats: expected at least two"):
        load_chats(records[:3], llama3)


def test_batches_show_which_chats_stand_in_them(llama3):
    chats = load_chats([{"prompt": "Two?", "completion": "One. " * n} for n in range(1, 6)], llama3, heldout=0)
    batches, heldout = chats.batches(2, 32)
    assert heldout is None and sorted(i for row in batches.rows for i in row) == [0, 1, 2, 3, 4]
    inputs, targets, segments = batches.batch_at(0)
    for row, number in enumerate(batches.sequences_of(0, slice(None))):
        for segment, i in enumerate(batches.rows[number], start=1):
            here, chat = segments[row] == segment, batches.chats[i]
            assert inputs[row][here].tolist() == chat.ids[:-1].tolist()
            assert targets[row][here][chat.wrote[1:]].tolist() == chat.ids[1:][chat.wrote[1:]].tolist()


def test_a_run_that_holds_nothing_out_trains_as_another_and_is_not_evaluated(tmp_path):
    chats = Chats(tuple(some_chats(12)), (), CONFIG.vocab_size)
    run = train(CONFIG, chats, SETTINGS, tmp_path / "one", progress=False)
    other = dataclasses.replace(chats, heldout=tuple(some_chats(3, 9)))
    evaluated = train(CONFIG, other, SETTINGS, tmp_path / "two", progress=False)
    assert run.finished and not any("val_loss" in row for row in run.metrics) and "val_loss" in evaluated.metrics[-1]
    assert [row["loss"] for row in run.metrics] == [row["loss"] for row in evaluated.metrics]
    lora = {"init": model_of(CONFIG), "lora": LoraConfig(ranks=(2, 3)), "progress": False}
    assert train(CONFIG, [chats, other], SETTINGS, tmp_path / "three", **lora).finished
