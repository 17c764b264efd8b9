from rota.node.node import Facts, Node

__all__ = ["Facts", "Node"]
