"""Fakes for tests and benches: a fake engine that is a real HTTP server, and fake devices.

Shipped so that anyone can test against rota without a GPU; never used by rota itself.
"""
