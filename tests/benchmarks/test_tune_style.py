"""The bundled model learns a style of captions from a few dozen of them."""

from __future__ import annotations

import json

import pytest

from benchmarks import tune_style


def test_a_caption_in_the_style_is_graded_as_the_caption_in_it() -> None:
    caption = "A red circle on the left, a big blue star in the center."
    styled = tune_style.in_style(caption)
    assert styled == "A picture of a red circle on the left, a big blue star in the center, flat design."
    assert tune_style._plain(styled) == caption
    assert tune_style._plain(caption) == caption


def test_the_pictures_that_are_counted_arent_trained_on() -> None:
    trained, counted = tune_style.captioned(6, 7), tune_style.captioned(4, 1007)
    assert [len(trained), len(counted)] == [6, 4]
    data = {case.messages[0]["content"][0]["image"] for case in trained}
    assert not data & {case.messages[0]["content"][0]["image"] for case in counted}
    assert all(case.is_right(case.expected) for case in trained)
    assert {tune_style.sample(case).messages[0].text for case in trained} == {tune_style.QUESTION}


@pytest.mark.slow
def test_the_style_is_learned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--captions", "60", "--pictures", "20", "--questions", "1", "--epochs", "3"]
    monkeypatch.setattr("sys.argv", ["tune_style", *options])
    tune_style.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["before"] == 0
    assert found["after"] >= 80
    before, after = found["held_out_loss"]
    assert after < 0.1 * before
