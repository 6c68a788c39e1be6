"""A conversation as a tree of messages with parent pointers: an edit or a new reply adds a child."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from qwen35mm.chat.store.records import Node
from qwen35mm.errors import ConversationDataError, NotFoundError
from qwen35mm_preprocess.say import say


class Tree:
    """The messages of one conversation: a tree, or several, since an edited first message is another root.

    Children are ordered by `created_s`, at equal times by arrival.

    Raises:
        ConversationDataError: a duplicate id, a missing parent, or a cycle.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        by_id: dict[str, Node] = {}
        for node in nodes:
            if node.id in by_id:
                raise ConversationDataError(say("The chat is damaged: two messages have the same id."))
            by_id[node.id] = node
        children: dict[str | None, list[Node]] = {None: []}
        for node in sorted(by_id.values(), key=lambda node: node.created_s):
            if node.parent is not None and node.parent not in by_id:
                raise ConversationDataError(say("The chat is damaged: a message's parent is missing."))
            children.setdefault(node.parent, []).append(node)
        self._nodes: Mapping[str, Node] = MappingProxyType(by_id)
        self._children = {parent: tuple(nodes) for parent, nodes in children.items()}
        if len(self._below(None)) != len(by_id):
            raise ConversationDataError(say("The chat is damaged: its messages form a loop."))

    @property
    def nodes(self) -> Mapping[str, Node]:
        """All messages by id in the order of their arrival; read-only."""
        return self._nodes

    def path(self, leaf_id: str | None) -> tuple[Node, ...]:
        """The messages from the root to `leaf_id`, which need not be a leaf; empty for None."""
        path = []
        while leaf_id is not None:
            node = self._node(leaf_id)
            path.append(node)
            leaf_id = node.parent
        return tuple(reversed(path))

    def children(self, parent_id: str | None) -> tuple[Node, ...]:
        """The answers to a message, oldest first; the roots for None."""
        if parent_id is not None:
            self._node(parent_id)
        return self._children.get(parent_id, ())

    def siblings(self, node_id: str) -> tuple[Node, ...]:
        """The children of the same parent, oldest first, including the node itself."""
        return self.children(self._node(node_id).parent)

    def newest_leaf(self, node_id: str | None) -> str | None:
        """The leaf at the end of the newest children; for None from the newest root."""
        if node_id is not None:
            self._node(node_id)
        while children := self._children.get(node_id):
            node_id = children[-1].id
        return node_id

    def subtree(self, node_id: str) -> frozenset[str]:
        """The ids of a message and of everything below it."""
        self._node(node_id)
        return frozenset((node_id, *self._below(node_id)))

    def _below(self, parent_id: str | None) -> list[str]:
        found: list[str] = []
        open_ids = [parent_id]
        while open_ids:
            ids = [node.id for node in self._children.get(open_ids.pop(), ())]
            found += ids
            open_ids += ids
        return found

    def _node(self, node_id: str) -> Node:
        node = self._nodes.get(node_id)
        if node is None:
            raise NotFoundError(say("This message is no longer in the chat."))
        return node
