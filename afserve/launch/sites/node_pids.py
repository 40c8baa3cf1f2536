"""Which process each node of a run has, by what is reported of starts and ends. It starts and ends none."""

from afserve.member import NodeId


class NodePids:
    """`pids` by the node's name: of its latest process. Hosts may have the same pid for two nodes."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self._nodes: dict[str, NodeId] = {}
        self._ended: set[tuple[str, int]] = set()

    def expect(self, node: NodeId) -> None:
        """A process of it is asked for; the end of an earlier one is nobody's concern any more."""
        self._nodes[str(node)] = node
        self.pids.pop(str(node), None)

    def note_start(self, node: NodeId, pid: int) -> None:
        self._nodes[str(node)], self.pids[str(node)] = node, pid
        self._ended.discard((str(node), pid))

    def note_end(self, name: str, pid: int) -> NodeId | None:
        """The node that has lost its process: none where another has its place, or it is an earlier controller's."""
        self._ended.add((name, pid))
        return self.called(name) if self.pids.get(name) == pid else None

    def inherit(self, node: NodeId, pid: int) -> None:
        """It says that it has been there since an earlier controller."""
        if (str(node), pid) not in self._ended:
            self._nodes.setdefault(str(node), node)
            self.pids.setdefault(str(node), pid)

    def running(self, node: NodeId) -> int | None:
        """The pid of its process, or None where it has none."""
        pid = self.pids.get(str(node))
        return None if (str(node), pid) in self._ended else pid

    def called(self, name: str) -> NodeId | None:
        return self._nodes.get(name)

    def names(self) -> tuple[str, ...]:
        """The nodes that have a process now."""
        return tuple(name for name, pid in self.pids.items() if (name, pid) not in self._ended)
