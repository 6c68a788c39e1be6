"""The tree of messages: paths, branches, and what is no tree."""

from __future__ import annotations

import random

import pytest

from qwen35mm.chat.store.records import Node
from qwen35mm.chat.store.tree import Tree
from qwen35mm.errors import ConversationDataError, NotFoundError
from tests.chat.helpers import node, reply

FIRST = node()
ANSWER = reply(FIRST.id)
AGAIN = reply(FIRST.id)
NEXT = node(ANSWER.id)
EDITED = node()
ALL = [FIRST, ANSWER, AGAIN, NEXT, EDITED]
CIRCLE = [node(NEXT.id, id=EDITED.id), node(EDITED.id, id=NEXT.id)]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_makes_the_same_tree(seed: int) -> None:
    tree = Tree(random.Random(seed).sample(ALL, len(ALL)))
    assert tree.path(NEXT.id) == (FIRST, ANSWER, NEXT)
    assert tree.path(ANSWER.id) == (FIRST, ANSWER)
    assert tree.path(None) == ()
    assert tree.children(None) == (FIRST, EDITED)
    assert tree.children(FIRST.id) == (ANSWER, AGAIN)
    assert tree.children(NEXT.id) == ()
    assert tree.siblings(AGAIN.id) == (ANSWER, AGAIN)
    assert tree.siblings(FIRST.id) == (FIRST, EDITED)
    assert tree.newest_leaf(FIRST.id) == AGAIN.id
    assert tree.newest_leaf(ANSWER.id) == NEXT.id
    assert tree.newest_leaf(None) == EDITED.id
    assert tree.subtree(FIRST.id) == {FIRST.id, ANSWER.id, AGAIN.id, NEXT.id}
    assert tree.subtree(NEXT.id) == {NEXT.id}
    assert dict(tree.nodes) == {message.id: message for message in ALL}
    assert Tree([]).newest_leaf(None) is None


def test_messages_of_one_time_stay_in_order() -> None:
    siblings = [node(created_s=7.0) for _ in range(9)]
    assert Tree(siblings).children(None) == tuple(siblings)


def test_a_long_chain_needs_no_deep_stack() -> None:
    chain = [node()]
    for _ in range(5_000):
        chain.append(node(chain[-1].id))
    tree = Tree(reversed(chain))
    assert tree.path(tree.newest_leaf(None)) == tuple(chain)
    assert len(tree.subtree(chain[0].id)) == len(chain)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([FIRST, node(id=FIRST.id)], "same id"),
        ([FIRST, node(parent="0" * 32)], "parent is missing"),
        ([FIRST, *CIRCLE], "form a loop"),
        ([node(FIRST.id, id=FIRST.id)], "form a loop"),
        ([FIRST, *CIRCLE, node(CIRCLE[0].id)], "form a loop"),
    ],
)
def test_what_is_no_tree_is_refused(nodes: list[Node], words: str) -> None:
    with pytest.raises(ConversationDataError, match=words):
        Tree(nodes)


def test_an_unknown_message_is_not_found() -> None:
    tree = Tree(ALL)
    for call in (tree.path, tree.children, tree.siblings, tree.newest_leaf, tree.subtree):
        with pytest.raises(NotFoundError):
            call("0" * 32)


def test_the_messages_are_read_only() -> None:
    with pytest.raises(TypeError):
        Tree(ALL).nodes["x"] = FIRST  # pyright: ignore[reportIndexIssue]
