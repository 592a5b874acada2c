"""An ``--external_plugins`` file: lets Accelerate shard on CPU ranks, where it silently trains with DDP instead."""

from accelerate import state

_make = state.AcceleratorState.__init__


def _make_sharding(self, *args, fsdp_plugin=None, **kwargs):
    _make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type is state.DistributedType.MULTI_CPU:
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)
        self.distributed_type = state.DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


state.AcceleratorState.__init__ = _make_sharding
