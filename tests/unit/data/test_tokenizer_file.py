"""What a tokenizer.json may ask of the library: ids and patterns, and what is said of others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from realhf.base.errors import UserError
from realhf.data import sort_task, tokenizer_file
from realhf.data.tokenizer_file import load_tokenizer, why_without_end

QUICK = [
    r"a|a*b*c*",
    r"a*b*c*|d*e*f*",
    r"(a*|b*)c*d*",
    r"(a*)(b*)c",
    r"a{1000}b{0,1000}c{1000,}",
    r"(?:ab)+(?:c)*",
    r"(?:[ab]c){2,}",
    r"(a|b)?c(?:d|e){1}(?:f|g){0,1}",
    r"(?:a*)?b",
    r"(?:a+){1}",
    r"(a|b)c*",
    r"(a|b)\d*",
    r"(a|b)[cd]*",
    r"\0a*",
    r"\d+\w\p{L}+\x{20}",
    r"[(a+)+]*",
    r"[[a|b](c+)]*",
    r"[\](a+)+]*",
    r"\(a|b\)*",
    r"\((a+)\)*",
    r"a)b*)*",
    r"(?i)(?:a)*(?=b)(?!c)(?<=d)(?<!e)(?<n>f)*(?>g)*",
    r"(?i-m:a)*(?-x:b)*",
    r"a*?b+?c",
    "",
    "\\",
]
WITHOUT_END = {
    "repeats a group that matches one text in several ways": [
        r"(a|b)*",
        r"(?:a|b){2}",
        r"(?:a|b){2,}",
        r"(?:a|b){0,2}",
        r"(?:a|b){,2}",
        r"(?:a?){2}",
        r"(?:a{,1}){5}",
        r"(?:a{0,2}){2}",
        r"(?:a+)+",
        r"(?:a{2,})+?",
        r"((a|b)c)*",
        r"(?i:a|b)*",
        r"(?i:a)*(b|c)*",
        r"(?<n>a+)*",
        r"(?=a+)*",
        r"[a](b+)*",
        r"[[a]b](c+)*",
        r"[a\]](b+)*",
        r"\[(b+)*",
        r"\p{L}(b+)*",
        r"(?:a*b)+",
        r"(?:\n+b)+",
    ],
    "repeats more than 3 parts in a row without a bound": [
        r"a*b*c*d*",
        r"a+b{2,}c*?d*",
        r"x|a*b*c*d*",
        r"a*b*c*d*|x",
        r"(a*b*|c*)d*e*",
        r"(x|a*b*)d*e*",
        r"(a*)(b*)(c*)(d*)",
        r"((a*)b*)(c*d*)",
        r"\d*\w*\s*\S*",
        r"[a]*[b]*[c]*[d]*",
    ],
    "refers back to what it has matched": [r"(a)\1", r"(a)\9", r"(?<w>a)\k<w>", r"(?<w>a)\g<w>"],
    "repeats a part more than 1000 times": [
        r"a{1001}",
        r"a{0,1001}",
        r"a{1001,}",
        r"a{1001,2000}",
        r"a{,1001}",
        r"[a]{1001}",
    ],
}


@pytest.mark.parametrize("pattern", QUICK)
def test_patterns_that_a_matcher_goes_through_quickly(pattern: str) -> None:
    assert why_without_end(pattern) == ""


@pytest.mark.parametrize(
    ("pattern", "why"), [(pattern, why) for why, patterns in WITHOUT_END.items() for pattern in patterns]
)
def test_patterns_that_may_take_too_long(pattern: str, why: str) -> None:
    assert why_without_end(pattern) == why


@pytest.fixture
def path(tmp_path: Path) -> Path:
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        load_tokenizer(path)
    return str(error.value)


REMEDY = "give a tokenizer.json of Hugging Face's tokenizers"


def test_files_that_are_no_tokenizers(path: Path, tmp_path: Path) -> None:
    says = f"tokenizer {tmp_path}/none: cannot be read (No such file or directory); {REMEDY}"
    assert refusal(tmp_path / "none") == says
    path.write_text("{")
    assert re.fullmatch(f"tokenizer {re.escape(str(path))}: not JSON \\(.+\\); {REMEDY}", refusal(path))
    for content in ("{}", "[]", "7", '{"model": 1, "added_tokens": [[1]]}'):
        path.write_text(content)
        says = refusal(path)
        assert re.fullmatch(f"tokenizer {re.escape(str(path))}: (?!not JSON|cannot).+; {REMEDY}", says)
        assert "\n" not in says


def test_the_largest_id(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the vocabulary and of added tokens; other numbers are no ids."""
    monkeypatch.setattr(tokenizer_file, "_MAX_ID", 31)
    truncation = {"direction": "Right", "max_length": 99, "strategy": "LongestFirst", "stride": 0}
    change(path, truncation=truncation)
    assert load_tokenizer(path).encode("ab", add_special_tokens=False).ids == [4, 5]
    monkeypatch.setattr(tokenizer_file, "_MAX_ID", 30)
    assert refusal(path) == f"tokenizer {path}: the token id 31 is above 30; {REMEDY}"
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    change(path, added_tokens=[{"id": 2, "content": "x", **flags}, {"id": 77, "content": "y", **flags}])
    assert "the token id 77 is above 30" in refusal(path)
    change(path, added_tokens=[{"id": "77", "content": "y", **flags}])
    assert "the token id 31 is above 30" in refusal(path)


def test_only_what_is_a_pattern_is_looked_at(path: Path) -> None:
    endless = "(a+)+$"
    change(path, normalizer={"type": "Replace", "pattern": {"String": endless}, "content": endless})
    assert load_tokenizer(path).encode("ab", add_special_tokens=False).ids == [4, 5]
    change(path, normalizer={"type": "Replace", "pattern": {"Regex": 7}, "content": "b"})
    assert refusal(path).endswith(REMEDY)
    content = json.loads(path.read_text())
    content["model"]["vocab"]["Regex"] = 32
    path.write_text(json.dumps(content | {"normalizer": None}))
    assert load_tokenizer(path).token_to_id("Regex") == 32
    long = "b" * 74 + endless + "c"
    change(
        path,
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"Regex": long}, "content": ""}],
        },
    )
    assert refusal(path) == (
        f"tokenizer {path}: the pattern {long[:80]!r} repeats a group that matches one text in several ways, so a "
        "short text can take it forever; give a tokenizer whose patterns repeat single characters and classes of them"
    )


def test_a_tokenizer_neither_fills_up_nor_cuts(path: Path) -> None:
    tokenizer = sort_task.make_tokenizer()
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    assert load_tokenizer(path).encode("ab").ids == [1, 4, 5]
    assert load_tokenizer(path).encode("abab").ids == [1, 4, 5, 4, 5]
