"""rota: more models than GPUs behind one endpoint."""

__version__ = "0.1.0"
