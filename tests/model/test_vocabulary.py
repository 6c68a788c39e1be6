"""The table for constrained decoding is built once, in a thread of its own, while a model loads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from qwen35mm.model import LoadedModel
from qwen35mm.model import vocabulary as module
from qwen35mm.model.vocabulary import GrammarVocabulary
from tests.engine.exact import DENSE, chat_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return chat_model(DENSE)


def test_loading_begins_it(loaded: LoadedModel) -> None:
    assert loaded.vocabulary._built is not None
    assert loaded.vocabulary.table.vocab_size == loaded.tokenizer.vocab_size
    assert loaded.vocabulary.table is loaded.vocabulary.table
    assert set(loaded.vocabulary.table.eos_tokens) == loaded.eos_ids


def test_it_is_built_elsewhere_and_waited_for(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, built_in, tokens = threading.Event(), [], module._Tokens

    def slow(*given: Any) -> Any:
        built_in.append(threading.current_thread().name)
        assert may_go_on.wait(60)
        return tokens(*given)

    monkeypatch.setattr(module, "_Tokens", slow)
    vocabulary = GrammarVocabulary(loaded.tokenizer, loaded.eos_ids)
    vocabulary.begin()
    vocabulary.begin()
    assert vocabulary._built is not None
    assert not vocabulary._built.done()
    may_go_on.set()
    assert vocabulary.table.vocab_size == loaded.tokenizer.vocab_size
    assert built_in == ["qwen35mm-vocabulary"]


def test_without_the_extra_nothing_happens(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    vocabulary = GrammarVocabulary(loaded.tokenizer, loaded.eos_ids)
    vocabulary.begin()
    assert vocabulary._built is None
    with pytest.raises(ImportError):
        _ = vocabulary.table


def test_a_fork_waits_for_no_thread_of_its_parent(loaded: LoadedModel) -> None:
    vocabulary = GrammarVocabulary(loaded.tokenizer, loaded.eos_ids)
    vocabulary._built, vocabulary._process = Future(), -1
    assert vocabulary.table.vocab_size == loaded.tokenizer.vocab_size
