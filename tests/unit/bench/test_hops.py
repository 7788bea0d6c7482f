"""How much of the package a cycle and an answer go through may fall, and does not rise."""

import pytest

from eagle_tools.bench import hops

FIXED_TREES = {"speculative_adaptive": "off"}  # an adaptive budget's cycles differ from run to run

# The most files and own classes with FIXED_TREES. Lower them when a change lowers them. Answers over HTTP differ by a
# file or two from run to run, because threads and timers decide what runs.
MOST = {
    "a cycle that drafts": (42, 25),
    "a plain cycle": (34, 21),
    "LLM.generate, 16 tokens": (67, 50),
    "/v1/completions, 16 tokens": (87, 51),
    "/v1/chat/completions, streamed, 16 tokens": (88, 55),
}


@pytest.mark.parametrize("name", MOST)
def test_no_walk_grows(name):
    walk = hops.WALKS[name](**FIXED_TREES)
    files, classes = MOST[name]
    assert len(walk.files) <= files, walk.files
    assert len(walk.objects) <= classes, walk.objects


def test_every_walk_is_bounded():
    assert MOST.keys() == hops.WALKS.keys()


def test_files_and_functions_of_the_package_are_counted():
    from eagle_server.request import SamplingParams
    from eagle_server.text.stop_strings import StopStrings

    recorder, seen = hops.CallRecorder(), list[hops.Hops]()
    with hops.profiled(recorder):
        StopStrings(["before"])
        with recorder.recording(seen):
            list(range(3))
            StopStrings(["x"])
            SamplingParams(max_tokens=1, seed=0).problems()
        StopStrings(["after"])
    [counted] = seen
    assert counted.files == ["request.py", "text/stop_strings.py"]
    assert counted.objects == {"StopStrings": 1}
    assert {code.co_name for code in counted.codes} >= {"__init__", "problems"}


def test_an_object_with_several_constructors_counts_once():
    source = """
class Base:
    def __init__(self):
        pass

class Special(Base):
    def __init__(self):
        super().__init__()
        Base()
"""
    names = {"__name__": "eagle_server.special"}
    exec(compile(source, f"{hops._PACKAGE}special.py", "exec"), names)
    recorder, seen = hops.CallRecorder(), list[hops.Hops]()
    with hops.profiled(recorder), recorder.recording(seen):
        names["Special"]()
    assert seen[0].objects == {"Special": 1, "Base": 1}


def test_the_table_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(hops, "WALKS", {"nothing": lambda: hops.Hops(frozenset(), hops.Counter({"Tree": 2}))})
    assert hops.main(["--files"]) == 0
    printed = capsys.readouterr().out
    assert "nothing" in printed and "own classes" in printed
    assert "Tree 2" in printed
