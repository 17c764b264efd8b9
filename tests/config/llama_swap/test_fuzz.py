"""Whatever is in the file: a page, or complaints; and what is a page is a file of ours.
How: a file with every key, with lines lost, doubled, moved in or overwritten at random."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.config.complaints import Complaints, InvalidConfig
from rota.config.document import read
from rota.config.llama_swap import convert, is_llama_swap

LINES = (Path(__file__).parent / "files" / "every_key.yaml").read_text().splitlines()
ENVIRON = {"LLM_KEY": "k", "CLOUD_KEY": 'a"b\\', "MODELS": "/m"}
PATH = Path("config.yaml")

changes = st.lists(
    st.tuples(
        st.integers(0, len(LINES) - 1),
        st.sampled_from(
            [
                *("", "x", "{}", "[]", "models:", "  a: ~", "- b", "  <<: *q", "x: &q {y: *q}"),
                *("${PORT}", "${a}", "ttl: .nan", "proxy: '['", "proxy: 'http://[x'", "cmd: 0x10"),
                *(
                    "  members: [[a]]",
                    "checkEndpoint: 'http://['",
                    "    env: {a: b}",
                    "\x85",
                    "é: ☃",
                ),
            ]
        ),
        st.sampled_from(["replace", "insert", "delete", "indent", "double"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes)
def test_nothing_breaks_it(changed: list[tuple[int, str, str]]) -> None:
    lines = list(LINES)
    for at, text, how in changed:
        where = min(at, len(lines) - 1)
        match how:
            case "replace":
                lines[where] = lines[where].partition(":")[0] + f": {text}"
            case "insert":
                lines.insert(where, text)
            case "delete":
                del lines[where]
            case "indent":
                lines[where] = f"  {lines[where]}"
            case _:
                lines.insert(where, lines[where])
    data = "\n".join(lines).encode()
    is_llama_swap(PATH, data, ENVIRON)
    try:
        made = convert({PATH: data}, ENVIRON)
    except InvalidConfig:
        return
    complaints = Complaints(PATH)
    read(PATH, complaints, made.text.encode())
    assert complaints.problems == []
