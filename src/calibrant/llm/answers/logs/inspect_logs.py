"""Logs of Inspect: ``.eval``, a zip archive of JSON, and ``.json``."""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from calibrant._core.checks import warn
from calibrant._core.messages import comma_separated, printable
from calibrant.llm.answers.logprobs import token_material
from calibrant.llm.answers.logs.completions import _question_of, _text_of
from calibrant.llm.answers.rows import Item, Row, _converted, _parsed
from calibrant.llm.heads.documents import BadDocument

_ZSTANDARD = 93
"""Compression of archives that zipfile reads from Python 3.14 on."""
_LENGTHS = 26
"""Offset of two lengths, of name and extra field, in the header of a zip member."""
_GRADES = {"C": True, "I": False, "N": False}
"""Correct, incorrect, and no answer, which Inspect counts as wrong; P is partly right."""
_CUT_OFF = ("max_tokens", "model_length")
"""Reasons why a model stopped before the end of its answer."""
_ATTACHMENT = "attachment://"
_MAX_MEMBER = 1 << 26
"""Bytes of a member when it is decompressed; JSON takes several times that when it is parsed."""
_MAX_LOG, _EXPANSION = 1 << 29, 200
"""Bytes of all members, whose texts are kept; more only as so many times the size of the file."""
_AS_JSON = "convert the log by inspect log convert --to json, and name the .json file"


def _inspect_files(path: Path) -> list[Path]:
    """Return the logs of Inspect in a folder and those within it, by name; or a log itself."""
    if not path.is_dir():
        return [path]

    def is_log(file: Path) -> bool:
        whole = _parsed(file.read_bytes(), str(file))
        return isinstance(whole, Mapping) and "eval" in whole

    files = sorted(file for file in path.rglob("*") if file.suffix in (".eval", ".json"))
    return [file for file in files if file.suffix == ".eval" or is_log(file)]


def _answers(file: Path, outcome: str | None) -> Iterator[Item]:
    """Yield the answers of a log, one for each question.

    ``outcome`` is the name of the scorer, by default the first. Answers of further epochs are
    ``samples`` of the first one.
    """
    about, samples = _document(file) if file.suffix == ".json" else _archive(file)
    scorers = dict[str, None]()

    def answer(sample: Mapping[str, Any], place: str) -> Row:
        scores = sample.get("scores")
        scorers.update(dict.fromkeys(scores if isinstance(scores, Mapping) else ()))
        return _answer(sample, place, outcome, about)

    yield from _first_epochs(_converted(samples, answer))
    if len(scorers) > 1 and outcome is None:
        first, *others = map(printable, scorers)
        warn(
            f"{file.name} has {len(scorers)} scorers, of which {first} is read: for another pass "
            f"its name as outcome ({comma_separated(others)})"
        )


def _first_epochs(items: Iterator[Item]) -> Iterator[Item]:
    """Yield one row for each question, with the answers of further epochs as samples.

    The rows come in the order of their ids: archives have another one than ``.json`` logs.
    """

    def order(placed: tuple[str, Row]) -> tuple[list[tuple[int, str]], int]:
        """Key by id, q2 before q10, and then by epoch."""
        parts = re.findall(r"\d+|\D+", placed[1]["id"])
        key = [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
        return key, placed[1]["epoch"]

    placed: list[tuple[str, Row]] = []
    for place, row in items:
        if isinstance(row, BadDocument):
            yield place, row
        else:
            placed.append((place, row))
    rows: dict[str, tuple[str, Row]] = {}
    for place, row in sorted(placed, key=order):
        del row["epoch"]
        _, first = rows.setdefault(row["id"], (place, row))
        if first is not row:
            first.setdefault("samples", []).append(row["answer"])
    yield from rows.values()


def _answer(sample: Mapping[str, Any], place: str, outcome: str | None, about: Row) -> Row:
    attached = sample.get("attachments") or {}
    if sample.get("error"):
        said = str(sample["error"].get("message", ""))
        raise BadDocument(place, f"ended with an error: {said:.100}")
    output = sample.get("output") or {}
    choices = output.get("choices") or [{}]
    score, right = _score(sample, outcome, place)
    written = output.get("completion") or _text_of(choices[0].get("message", {}).get("content"))
    answer = str(score.get("answer") or written)
    # a scorer may take a part of the text for the answer, and the tokens are those of all of it
    more: Row = {} if answer == written else {"completion": _resolved(written, attached)}
    more |= {"truncated": True} if choices[0].get("stop_reason") in _CUT_OFF else {}
    return {
        "id": str(sample["id"]),
        "epoch": int(sample.get("epoch") or 1),
        "question": _resolved(_question_of(_resolved(sample.get("input"), attached)), attached),
        "answer": _resolved(answer, attached),
        "model": about["model"],
        "kind": about["kind"],
        "correct": right,
        **more,
        **token_material(choices[0].get("logprobs"), place),
    }


def _resolved(content: Any, attached: Mapping[str, str]) -> Any:
    """Replace references to long texts, which the log has once."""
    if isinstance(content, str) and content.startswith(_ATTACHMENT):
        return attached.get(content.removeprefix(_ATTACHMENT), content)
    if isinstance(content, list):
        return [
            {**one, "content": _resolved(one.get("content"), attached)}
            if isinstance(one, Mapping)
            else one
            for one in content
        ]
    return content


def _score(
    sample: Mapping[str, Any], outcome: str | None, place: str
) -> tuple[Mapping[str, Any], bool]:
    """Return the score that says if the answer is right, and whether it is."""
    scores = sample.get("scores") or {}
    name = outcome if outcome is not None else next(iter(scores), "")
    if name not in scores:
        named = f"no score of {printable(name)}" if name else "no score"
        raise BadDocument(place, f"has {named}, it has {comma_separated(scores)}")
    value = scores[name].get("value")
    known = _GRADES.get(value) if isinstance(value, str) else None
    if known is None and value not in (0, 1):  # also True and False
        raise BadDocument(
            place, f"must be scored as right or wrong (C, I, N, 0 or 1), got {value!r:.40}"
        )
    return scores[name], bool(value) if known is None else known


def _about(header: Any) -> Row:
    """Return what was run, from the header of a log."""
    if isinstance(header, BadDocument):
        raise header
    run = header.get("eval")
    if not isinstance(run, Mapping):
        raise ValueError(f"the header of a log of Inspect must say what was run, got {run!r:.40}")
    return {"model": str(run.get("model", "")), "kind": str(run.get("task", ""))}


def _document(file: Path) -> tuple[Row, Iterator[Item]]:
    """Return what a ``.json`` log is about, and its samples."""

    def place(sample: Any) -> str:
        named = sample if isinstance(sample, Mapping) else {}
        return f"sample {named.get('id')} (epoch {named.get('epoch', 1)}) of {file}"

    whole = _parsed(file.read_bytes(), str(file))
    about, samples = _about(whole), whole.get("samples") or []
    if not isinstance(samples, list):
        raise ValueError(f"{file} must have a list of samples, got {samples!r:.40}")
    return about, ((place(one), one) for one in samples)


def _archive(file: Path) -> tuple[Row, Iterator[Item]]:
    """Return what an ``.eval`` log is about, and its samples."""
    try:
        with zipfile.ZipFile(file) as archive:
            # the last of each name
            members = {info.filename: info for info in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError) as error:
        problem = f"{file} is not a zip archive, or it is cut off ({error}): copy or run it again"
        raise ValueError(problem) from error
    # a run that was killed has no header yet
    header = members.get("header.json", members.get("_journal/start.json"))
    if header is None:
        raise ValueError(f"{file} is a zip archive without header.json: it is not a log of Inspect")
    size = sum(member.file_size for member in members.values())
    if size > max(_MAX_LOG, _EXPANSION * file.stat().st_size):
        raise ValueError(f"{file} holds {size / 1e6:,.0f} MB when decompressed: {_AS_JSON}")
    names = sorted(name for name in members if name.startswith("samples/"))
    samples = ((f"{name} of {file}", _object(file, members[name])) for name in names)
    return _about(_object(file, header)), samples


def _object(file: Path, member: zipfile.ZipInfo) -> Any:
    """Return the object of JSON in a member of an archive, or why there is none."""
    place = f"{member.filename} of {file}"
    if member.file_size > _MAX_MEMBER:
        size = f"holds {member.file_size / 1e6:,.0f} MB when decompressed"
        return BadDocument(place, f"{size}, up to {_MAX_MEMBER / 1e6:,.0f} are read: {_AS_JSON}")
    try:
        return _parsed(_content(file, member), place)
    except ImportError:
        raise
    except Exception as error:  # each library of compression has its own
        return BadDocument(place, f"is damaged ({error})")


def _content(file: Path, member: zipfile.ZipInfo) -> bytes:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.read(member)  # of the size that it declares, or an error
    except NotImplementedError:
        if member.compress_type != _ZSTANDARD:
            raise
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            f"{file} is compressed by Zstandard, as logs of Inspect are by default: pip install "
            "'calibrant[logs]', or write logs with inspect eval --log-format json"
        ) from error
    with file.open("rb") as stream:
        stream.seek(member.header_offset + _LENGTHS)
        name, extra = struct.unpack("<HH", stream.read(4))
        stream.seek(name + extra, os.SEEK_CUR)
        packed = io.BytesIO(stream.read(member.compress_size))
    content = zstandard.ZstdDecompressor().stream_reader(packed).read(member.file_size)
    if zlib.crc32(content) != member.CRC:
        raise ValueError("its checksum is wrong")
    return content
