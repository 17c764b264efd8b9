"""What will not fit on the devices that rota found: said when it starts, and when its file has
changed. Where devices are stated, the file's own warnings say so."""

from __future__ import annotations

import logging

from rota.config.fit import fits, needs_of, want_of
from rota.config.units import show_mib
from rota.controller import Controller

log = logging.getLogger("rota")


def say_devices(controller: Controller) -> None:
    """Log what there is to place models on."""
    totals = _totals(controller)
    where = ", ".join(f"{device} {show_mib(mib)}" for device, mib in totals.items())
    log.info("devices, %s: %s", "as stated" if controller.config.devices else "as found", where)


def warn_of_room(controller: Controller) -> None:
    """Log which models will not fit, alone or together."""
    config = controller.config
    if config.devices:
        return
    totals = _totals(controller)
    models = [entry.model for entry in config.models.values()]
    served = [model for model in models if not model.is_external and not model.scaling.is_off]
    for model in served:
        if not fits([want_of(model)], totals):
            log.warning("model %s will not fit: it needs %s", model.name, needs_of(model))
    always = [model for model in served for _ in range(model.scaling.min)]
    if not fits([want_of(model) for model in always], totals):
        names = ", ".join(sorted({model.name for model in always}))
        log.warning("models that always run will not fit together: %s", names)


def _totals(controller: Controller) -> dict[str, int]:
    devices = controller.status()["devices"]
    assert isinstance(devices, list), devices
    return {str(device["id"]): int(device["memory_mib"]) for device in devices}
