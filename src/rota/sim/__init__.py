"""The real scheduler in virtual time: hours of trouble in a second, from one seed.

Everything random comes from `random.Random(seed)`, so a failing seed is a bug report:
`rota sim 1 --seed S`. See `run` for what is asserted.
"""
