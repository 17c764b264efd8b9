"""The one loop around the scheduler, and what it offers the gateway and the verbs."""

from rota.controller.controller import Controller
from rota.controller.handles import GrantHandle, Lease

__all__ = ["Controller", "GrantHandle", "Lease"]
