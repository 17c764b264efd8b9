"""`python -m rota.cli` is `rota`."""

from rota.cli.verbs import main

main(prog_name="rota")
