"""The verbs of calibrant llm."""

import copy
import inspect
import json
import re
import warnings
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant._core.torch_models import own_device
from calibrant.cli.llm import ROWS, fit
from calibrant.cli.llm_answers import AGGREGATES
from calibrant.llm.answers.asking import ask
from calibrant.llm.answers.calibrator import AnswerCalibrator
from calibrant.llm.answers.choices import ask_choices
from calibrant.llm.answers.confidence import Aggregator, answer_confidence
from calibrant.llm.answers.questions import (
    Question,
    exact_match,
    read_mmlu,
    read_questions,
    short_prompt,
    verdict_prompt,
)
from calibrant.llm.answers.rows import Source
from calibrant.llm.heads.collect import collect
from calibrant.llm.heads.fit import fit_head
from calibrant.llm.heads.fitted import FittedHead, token_predictions
from calibrant.llm.heads.tables import open_table
from calibrant.llm.models.huggingface import fingerprint_of
from calibrant.llm.models.loading import load_model
from tests.support.language_models import (
    PROMPTS,
    QUIZ_WORDS,
    quiz_model,
    quiz_tokenizer,
    random_head,
    transformers,
    true_by_hand,
)
from tests.support.markup import parsed
from tests.support.warm_scripts import Script


@pytest.fixture(scope="module")
def tokenizer():
    return quiz_tokenizer()


@pytest.fixture(scope="module")
def model():
    return quiz_model()


@pytest.fixture(scope="module")
def saved(model, tokenizer, tmp_path_factory):
    """A folder with the model, texts, and questions."""
    folder = tmp_path_factory.mktemp("llm")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    texts = [{"text": " ".join(rng.choice(QUIZ_WORDS[4:], 20))} for _ in range(30)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    blocks = (f"what is it {word}\nyes\n" for word in QUIZ_WORDS[14:22])
    (folder / "questions.txt").write_text("\n".join(blocks))
    return folder


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_from_documents_to_an_answer(run, saved, model):
    table, head = saved / "table", saved / "head"
    code, _, err = run("llm", "collect", saved / "model", saved / "texts.jsonl", "-o", table)
    assert code == 0, err
    assert "570 tokens of 30 documents" in err
    assert len(open_table(table)) == 570
    for setting, message in (
        ("units=2.5", "error: units must be a whole number, at least 1, got '2.5'"),
        ("unit=2", "error: the mlp head has no option 'unit': did you mean units?"),
        ("over=5", "error: the mlp head has no option 'over'"),
    ):
        wrong = ("--head", "mlp", "--set", setting, "-o", head)
        code, _, err = run("llm", "fit", table, *wrong)
        assert code == 2
        assert message in err
    code, out, err = run("llm", "fit", table, "--head", "global", "--json", "-o", head)
    assert code == 0, err
    told = json.loads(out)
    fitted = cal.load(head)
    assert told["figures"]["global"] == fitted.figures["global"]
    assert told["figures"]["global"]["brier"] < told["figures"]["before"]["brier"]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = run("llm", "evaluate", head, table, "--level", "0", "--json")
    assert code == 0, err
    assert "warning: the head was trained on tokens of this table" in err
    found = json.loads(out)
    with pytest.warns(UserWarning, match="trained on tokens of this table"):
        claims = token_predictions(open_table(table), fitted)
    (found,) = found["sources"]
    assert found["global"]["metrics"]["nll"]["value"] == pytest.approx(claims.nll.mean())
    assert found["before"]["metrics"]["nll"]["value"] > found["global"]["metrics"]["nll"]["value"]
    assert found["gains"]["before"]["nll"]["mean"] < 0
    code, _, err = run("llm", "evaluate", head)
    assert code == 2
    assert "is a head: add the tables or questions" in " ".join(err.split())

    page = saved / "answer.html"
    code, out, err = run(
        *("llm", "ask", saved / "model", PROMPTS[0], head, "--max-new-tokens", "4"),
        *("--html", page),
    )
    assert code == 0, err
    lines = out.splitlines()
    assert lines[-1].startswith("confidence ")
    assert f"wrote {page}" in err
    assert PROMPTS[0] in parsed(page.read_text("utf-8")).text
    code, abstained, _ = run(
        "llm", "ask", saved / "model", PROMPTS[0], head, "--min-confidence", "1.0"
    )
    assert code == 0
    assert abstained.startswith("no answer")

    rng = np.random.default_rng(0)
    answers = [rng.beta(4, 1, size=3) for _ in range(600)]
    right = rng.random(600) < answer_confidence(answers) / 2
    sure = answer_confidence(answers)
    mapped = AnswerCalibrator().fit(sure[:300], right[:300], source=Source("geometric"))
    cal.save(mapped, saved / "mapped.json")
    told = ["llm", "ask", saved / "model", PROMPTS[0], "--map", saved / "mapped.json"]
    code, out, err = run(*told)
    assert code == 0, err
    (answer,) = ask(*load_model(saved / "model"), [PROMPTS[0]], max_new_tokens=64)
    chance = float(mapped.predict([answer.confidence])[0])
    assert out.splitlines()[-1] == f"confidence {100 * chance:.0f} %"
    found = mapped.control(sure[300:], right[300:], max_error=0.05)
    cal.save(mapped, saved / "mapped.json")
    assert "no confidence met the target error" in run(*told)[1]
    mapped.threshold_ = found._replace(threshold=chance + 0.01)
    cal.save(mapped, saved / "mapped.json")
    for more in ([], ["--min-confidence", chance / 2]):
        assert f"below {100 * (chance + 0.01):.0f} %" in run(*told, *more)[1]
    lengths = [
        one.probs.size for one in ask(*load_model(saved / "model"), PROMPTS, max_new_tokens=64)
    ]
    longest = int(np.argmax(lengths))
    cut = ["--max-new-tokens", lengths[longest] - 1]
    code, out, _ = run("llm", "ask", saved / "model", PROMPTS[longest], *cut)
    assert out.splitlines()[-1].endswith(f"truncated by --max-new-tokens {lengths[longest] - 1}")
    code, _, err = run(*told[:4], "--min-confidence", "nan")
    assert code == 2
    assert "from 0 to 1, got nan" in err

    questions = ["--model", saved / "model", "--shots", "1", "--level", "0"]
    code, out, err = run("llm", "evaluate", head, saved / "questions.txt", *questions)
    assert code == 0, err
    assert "7 answers" in out
    assert "as it is" in out
    assert "one temperature" in out
    assert "by questions" in out


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_quiet_verb_shows_no_bars_of_transformers(run, saved):
    transformers.utils.logging.enable_progress_bar()
    code, out, err = run("llm", "ask", saved / "model", PROMPTS[0], "--quiet")
    assert (code, err) == (0, "")
    assert "confidence" in out


def said(run, *arguments):
    """Confidence in percent at the end of what the command wrote, and all of it."""
    code, out, err = run("llm", "ask", *arguments)
    assert code == 0, err
    return out.splitlines()[-1], out


def percent(chance):
    return f"confidence {100 * chance:.0f} %"


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("chat", [False, True])
def test_confidence_by_a_second_prompt(run, saved, model, tokenizer, tmp_path, chat):
    folder = saved / "model"
    if chat:
        folder = tmp_path / "chat"
        model.save_pretrained(folder)
        talking = copy.deepcopy(tokenizer)
        talking.chat_template = "{{ '<s> red ' + messages[0]['content'] + ' blue' }}"
        talking.save_pretrained(folder)

    def form(text):
        return f"<s> red {text} blue" if chat else text

    (answer,) = ask(model, tokenizer, [form(PROMPTS[0])], max_new_tokens=64)
    prompt = form(verdict_prompt(Question(PROMPTS[0], ()), answer.text))
    chance = true_by_hand(model, tokenizer, prompt)
    assert percent(chance) != percent(answer.confidence)
    second = (folder, PROMPTS[0], "--confidence", "p_true")
    assert said(run, *second)[0] == percent(chance)
    cal.save(FittedHead.from_temperature(3.0, fingerprint_of(model)), tmp_path / "head")
    softer = percent(true_by_hand(model, tokenizer, prompt, 3.0))
    assert said(run, *second, tmp_path / "head")[0] == softer != percent(chance)
    assert said(run, *second, "--min-confidence", min(1, chance + 1e-5))[1].startswith("no answer")
    assert not said(run, *second, "--min-confidence", chance - 1e-5)[1].startswith("no answer")
    assert said(run, *second, "--plain")[0] == said(run, saved / "model", *second[1:])[0]

    rng = np.random.default_rng(0)
    claims = rng.random(400)
    mapped = AnswerCalibrator().fit(claims, rng.random(400) < claims / 2)
    cal.save(mapped, tmp_path / "mapped.json")
    told = said(run, *second, "--map", tmp_path / "mapped.json")[0]
    assert told == percent(float(mapped.predict([chance])[0]))


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_calibrator_and_confidence_must_agree(run, saved, tmp_path):
    rng = np.random.default_rng(0)
    claims, right = rng.random(400), rng.random(400) < 0.5
    cal.save(AnswerCalibrator().fit(claims, right), tmp_path / "other.json")
    minimum = AnswerCalibrator().fit(claims, right, source=Source("minimum"))
    cal.save(minimum, tmp_path / "least.json")
    start = ("llm", "ask", saved / "model", PROMPTS[0], "--map")
    code, _, err = run(*start, tmp_path / "other.json")
    assert code == 2
    assert "fitted on other confidences: pass confidence" in err
    code, _, err = run(*start, tmp_path / "least.json", "--confidence", "p_true")
    assert code == 2
    assert "fitted on minimum confidences, got confidence=p_true" in err
    assert run(*start, tmp_path / "least.json", "--confidence", "minimum")[0] == 0


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_confidences_of_the_command(run, saved, model, tokenizer):
    assert get_args(Aggregator) == AGGREGATES
    (answer,) = ask(model, tokenizer, [PROMPTS[0]], max_new_tokens=5)
    start = (saved / "model", PROMPTS[0], "--max-new-tokens", "5")
    for rule in get_args(Aggregator):
        wanted = percent(float(answer_confidence([answer.probs], rule)[0]))
        assert said(run, *start, "--confidence", rule)[0] == wanted


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_questions_are_measured_by_a_second_prompt(run, saved, model, tokenizer, tmp_path):
    source = saved / "questions.txt"
    cal.save(FittedHead.from_temperature(3.0, fingerprint_of(model)), tmp_path)
    start = ("llm", "evaluate", tmp_path, source, "--model", saved / "model")
    options = ("--shots", "0", "--level", "0", "--json")
    code, out, err = run(*start, *options, "--confidence", "p_true")
    assert code == 0, err
    ((found,), (plain,)) = (json.loads(text)["sources"] for text in (out, run(*start, *options)[1]))
    questions = read_questions(source)
    answers = ask(model, tokenizer, [short_prompt(question) for question in questions])
    pairs = list(zip(questions, answers, strict=True))
    right = np.array([exact_match(answer.text, question.references) for question, answer in pairs])
    for name, temperature in {"before": 1.0, "global": 3.0}.items():
        prompts = [verdict_prompt(question, answer.text) for question, answer in pairs]
        chances = [true_by_hand(model, tokenizer, prompt, temperature) for prompt in prompts]
        brier = np.mean((np.array(chances) - right) ** 2)
        assert found[name]["metrics"]["brier"]["value"] == pytest.approx(brier, abs=1e-5)
        assert plain[name]["metrics"]["brier"]["value"] != pytest.approx(brier, abs=1e-3)


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_questions_are_measured_beside_one_temperature(run, saved, model, tmp_path):
    fitted = FittedHead(random_head("linear"), fingerprint_of(model), "nll")
    cal.save(replace(fitted, settings={"temperature": 2.0}), tmp_path / "head")
    asked = ("--model", saved / "model", "--shots", "1", "--level", "0")
    start = ("llm", "evaluate", tmp_path / "head", saved / "questions.txt", *asked)
    code, out, err = run(*start, "--json")
    assert code == 0, err
    (found,) = json.loads(out)["sources"]
    assert [name for name in found if name in ROWS] == [*ROWS]
    assert {*found["gains"]} == {"before", "head"}
    for score in ("nll", "brier"):
        values = {name: found[name]["metrics"][score]["value"] for name in ROWS}
        for name, gains in found["gains"].items():
            assert gains[score]["mean"] == pytest.approx(values["global"] - values[name])
            assert gains[score]["documents"] == 7
            assert gains[score]["error"] > 0
    _, out, _ = run(*start)
    rows = [line.split("  ")[0].strip() for line in out.splitlines()]
    assert [row for row in rows if row in ROWS.values()] == [*ROWS.values(), "as it is", "head"]


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_each_process_reports_its_documents(run, saved, tmp_path, monkeypatch):
    (tmp_path / "texts.txt").write_text("\n\n".join(["one two three", "red", *["is it"] * 5]))
    monkeypatch.setenv("WORLD_SIZE", "3")
    told = []
    for rank in "012":
        monkeypatch.setenv("RANK", rank)
        command = ("llm", "collect", saved / "model", tmp_path / "texts.txt")
        code, _, err = run(*command, "-o", tmp_path / "table")
        assert code == 0, err
        told.append(err.splitlines()[-1].split(": ")[1].split(";")[0])
    # nothing predicts the only token of the second document
    assert told == [f"{tokens} tokens of 2 of 7 documents" for tokens in (3, 2, 2)]
    assert len(open_table(tmp_path / "table")) == 7


@pytest.fixture(scope="module")
def lettered(saved):
    """A folder of MMLU."""
    folder = saved / "mmlu"
    folder.mkdir()
    for split, texts in {"dev": ["two", "red"], "test": ["what is it", "is it", "it"]}.items():
        rows = "".join(f"{text},one,two,three,four,{n}\n" for n, text in enumerate(texts))
        head = "question,choice0,choice1,choice2,choice3,answer\n"
        (folder / f"numbers_{split}.csv").write_text(head + rows)
    return folder


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_several_sources_are_one_list(run, saved, lettered, model, tokenizer):
    sources = [saved / "questions.txt", lettered]
    start = ("--model", saved / "model", "--shots", "1", "--level", "0")
    code, out, err = run("llm", "evaluate", *sources, *start, "--json")
    assert code == 0, err
    both = json.loads(out)["sources"]
    assert [one["source"] for one in both] == list(map(str, sources))
    for source, one in zip(sources, both, strict=True):
        alone = json.loads(run("llm", "evaluate", source, *start, "--json")[1])
        assert alone["sources"] == [one]
    shown = run("llm", "evaluate", *sources, *start)[1]
    assert shown.index(f"{sources[0]}: 7 answers") < shown.index(f"{lettered}: 3 answers")
    questions = read_mmlu(lettered)
    logits, labels = ask_choices(model, tokenizer, questions, shots=read_mmlu(lettered, "dev")[:1])
    right = float((logits.argmax(-1) == labels).mean())
    assert both[1]["before"]["metrics"]["accuracy"]["value"] == pytest.approx(right)


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_options_in_other_orders(run, saved, lettered):
    start = ("llm", "evaluate", lettered, "--model", saved / "model", "--permutations", "cyclic")
    code, out, err = run(*start, "--level", "0", "--json")
    assert code == 0, err
    (found,) = json.loads(out)["sources"]
    assert {"before", "permuted"} <= {*found}
    assert [*found["option_bias"]] == ["before", "permuted"]
    assert found["option_bias"]["before"]["right"] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    _, out, _ = run(*start)
    assert "permuted: chosen letters of 3 questions" in " ".join(out.split())
    code, _, err = run(*start[:2], saved / "questions.txt", *start[3:])
    assert code == 2
    assert "--permutations is for letters" in err


@pytest.mark.parametrize("shots", [8, 11])
def test_too_many_shots_are_refused(run, saved, shots):
    start = ("llm", "evaluate", saved / "questions.txt", "--model", "none", "--shots", shots)
    code, _, err = run(*start)
    assert code == 2
    told = " ".join(err.split())
    assert f"has 8 questions, too few for {shots} shots" in told


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_unused_options_are_refused(run, saved, lettered):
    options = [("--confidence", "first"), ("--limit", "3"), ("--shots", "5")]
    for option in (*options, ("--permutations", "all")):
        code, _, err = run("llm", "evaluate", saved / "table", *option)
        assert code == 2
        assert f"{option[0]} is for questions" in " ".join(err.split())
    start = ("llm", "evaluate", saved / "questions.txt", lettered, "--model", "none")
    code, _, err = run(*start, "--confidence", "first")
    assert code == 2
    assert "--confidence is for written answers" in err


def test_epochs_are_those_of_python():
    (option,) = (one for one in fit.params if one.name == "epochs")
    assert option.default == inspect.signature(fit_head).parameters["epochs"].default


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_ats_on_the_command_line(run, saved, tmp_path):
    table, head = tmp_path / "table", tmp_path / "head"
    texts = saved / "texts.jsonl"
    assert not run("llm", "collect", saved / "model", texts, "--prompts", "-o", table)[0]
    paper = ("--head", "ats", "--set", "attention_heads=4", "--epochs", "1", "-o", head)
    for wrong in ("none", "3"):
        code, _, err = run("llm", "fit", table, *paper, "--alpha", wrong)
        assert code == 2
        assert "alpha must be a number from 0 to 1 or 'search'" in err
    options = ("--alpha", "0.5", "--set", "weighting=official", "--keep-always")
    code, out, err = run("llm", "fit", table, *paper, *options)
    assert code == 0, err
    assert "the ats head is kept (keep_always)" in " ".join(out.split())
    fitted = cal.load(head)
    assert (fitted.objective, fitted.settings["alpha"]) == ("selective", 0.5)
    code, out, err = run("llm", "evaluate", head, table)
    assert code == 0, err
    rows = [line.split("  ")[0].strip() for line in out.splitlines()]
    assert [row for row in rows if row in ROWS.values()] == [*ROWS.values(), "as it is", "head"]
    assert "gain over one temperature (± standard error by documents)" in out


@pytest.mark.slow
def test_two_processes_collect_what_one_does(run, saved, tmp_path, monkeypatch):
    arguments = ["llm", "collect", saved / "model", saved / "texts.jsonl", "-o"]
    code, _, err = run(*arguments, tmp_path / "one")
    assert code == 0, err
    # as torchrun tells them apart: this process, and one of its own
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    env = {"RANK": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    main = "from calibrant import cli; cli.main()"
    other = Script(main, *arguments, tmp_path / "two", env=env)
    code, _, err = run(*arguments, tmp_path / "two")
    assert code == 0, err
    done = other.result()
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["rank-0", "rank-1"]
    one, two = open_table(tmp_path / "one"), open_table(tmp_path / "two")
    np.testing.assert_array_equal(one.documents, two.documents)
    # batches differ, and with them the rounding of sums
    np.testing.assert_allclose(one.hidden(), two.hidden(), rtol=2e-3, atol=2e-3)
    mine, theirs = one.records(), two.records()
    np.testing.assert_array_equal(mine.labels, theirs.labels)
    for name in ("table", "own_gap", "mean_gap", "top"):
        np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-4, atol=1e-4)


@pytest.fixture
def with_gpus(monkeypatch):
    """Let the check of devices, which makes an empty tensor there, pass."""
    empty = torch.empty

    def anywhere(*size, **options):
        return None if size == (0,) else empty(*size, **options)

    monkeypatch.setattr(torch, "empty", anywhere)


@pytest.mark.usefixtures("with_gpus")
def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    assert str(own_device("cuda")) == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    names = ("cuda", "cuda:1", "cpu", torch.device("cuda"))
    assert [str(own_device(name)) for name in names] == ["cuda:3", "cuda:1", "cpu", "cuda:3"]


def test_a_device_or_precision_that_is_not_there(run, saved):
    for option in (("--device", "gpu"), ("--device", "cuda:77"), ("--dtype", "float17")):
        code, _, err = run("llm", "ask", str(saved / "model"), "Who?", *option)
        assert code
        assert "cannot be used here" in err or "dtype must be auto, float32" in err
        assert "Traceback" not in err


@pytest.fixture
def without_weights(monkeypatch):
    """Loading weights, which is slow, fails."""

    def fails(*_, **__):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fails)


@pytest.mark.usefixtures("without_weights")
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"question": "what", "answer": "it"}'], r"line 1 of .* no chat template.*prompts with"),
        (['"what"', '{"x": 1}', '{"text": 2}'], r"cannot use 2 of 3 documents of .*\n  line 2: "),
        (['"what"', '"\\ud83d"'], r"line 2 of .* half of a character.*skip_bad"),
        (['"what"', "[" * 5000], r"line 2 of .* is not valid JSON"),
    ],
)
def test_mistakes_in_documents_show_before_the_weights_are_loaded(
    run, saved, tmp_path, lines, message
):
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    options = ["-o", tmp_path / "table"]
    code, _, err = run("llm", "collect", saved / "model", tmp_path / "d.jsonl", *options)
    assert code == 2
    assert re.search(message, err), err
    assert not (tmp_path / "table").exists()


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_bad_documents_are_left_out_and_listed(run, saved, tmp_path):
    lines = ['"what is it"', '{"x": 1}', '"is it\\ud83d"', '"is it red"', '"no"']
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    options = ["--skip-bad", "--limit", "4", "-o", tmp_path / "table"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = run("llm", "collect", saved / "model", tmp_path / "d.jsonl", *options)
    assert code == 0, err
    assert f"warning: left out 2 of 4 documents of {tmp_path / 'd.jsonl'}:\n  line 2: must" in err
    assert "\n  line 3: has half of a character" in err
    assert "4 tokens of 2 documents" in err
    assert open_table(tmp_path / "table").documents.tolist() == [0, 0, 1, 1]


@pytest.mark.usefixtures("without_weights")
def test_a_file_of_documents_that_is_not_there(run, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    for name, message in (("gone.jsonl", "No such file"), ("d.csv", "must be .jsonl, .json or")):
        code, _, err = run("llm", "collect", saved / "model", tmp_path / name, "-o", tmp_path / "t")
        assert code == 2
        assert message in err


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_models_runs_only_where_it_is_trusted(run, saved, monkeypatch, trusted):
    asked = []

    def recorded(path, *, trust_remote_code, **_):
        asked.append(trust_remote_code)
        raise ValueError("enough")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", recorded)
    flag = ["--trust-remote-code"] * trusted
    questions = [saved / "questions.txt", "--shots", "1", "--model", saved / "model"]
    for verb in (
        ["collect", saved / "model", saved / "texts.jsonl", "-o", saved / "never"],
        ["ask", saved / "model", "what is it"],
        ["evaluate", *questions],
    ):
        code, _, err = run("llm", *verb, *flag)
        assert (code, "enough" in err) == (2, True)
    assert asked == [trusted] * 3


@pytest.mark.parametrize("path", ["./nowhere", "nowhere/", "nowhere.gguf", "/nowhere/model"])
def test_a_model_that_is_not_there(run, path):
    code, _, err = run("llm", "ask", path, "Who?")
    assert code
    assert f"there is no model at {path}" in err


def test_a_folder_without_a_model(run, tmp_path):
    code, _, err = run("llm", "ask", tmp_path, "Who?")
    assert code == 2
    assert err == f"error: {tmp_path} is not a model folder: it has no config.json\n"


def test_a_blank_question_is_refused(run, saved):
    code, _, err = run("llm", "ask", str(saved / "model"), "  ")
    assert code == 2
    assert "the question is empty" in err


def test_questions_without_a_model(run, tmp_path):
    (tmp_path / "questions.txt").write_text("Who?\n")
    code, _, err = run("llm", "evaluate", str(tmp_path / "questions.txt"))
    assert code == 2
    assert "is a file: questions need --model, tables are folders" in err


@pytest.mark.usefixtures("with_gpus")
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_models_are_moved_to_the_device_of_their_process(saved, model, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    went = []

    def to(self, place):
        went.append(str(place))
        return self

    monkeypatch.setattr(transformers.LlamaForCausalLM, "to", to)
    load_model(saved / "model", device="cuda")
    collect(model, [{"input_ids": [4, 5]}], tmp_path, device="cuda")
    assert went == ["cuda:3", "cuda:3"]
