"""Which of a machine's devices a run uses, in the order in which llama.cpp puts layers on them."""

from dataclasses import replace

from llmcli.errors import UserError
from llmcli.planning.machine import Machine, OffloadDevice, read_machine
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.model_placement import HOST_BUFFER, NO_DEVICES, TensorOverride
from llmcli.runtime.binding.placement.placement_params import buffers_hint, devices_hint
from llmcli.runtime.requests.placement_options import PlacementOptions


def resolve_devices(options: PlacementOptions) -> PlacementOptions:
    """Check options against the devices of this machine and of the joined workers. Return them with
    the device of each override in place of the name of a buffer type. Raises UserError.
    """
    machine = use_devices(read_machine(), options)
    names = [device.name for device in machine.devices]
    if len(options.tensor_split) > len(names):
        raise UserError(
            f"--tensor-split has {len(options.tensor_split)} numbers for {len(names)} devices",
            hint="give one number for each device, in this order: "
            f"{', '.join(names) or 'there are none here'}",
        )
    if options.split_mode == "row":
        unable = next((name for name in names if not devices.splits_rows(name)), None)
        if unable is not None:
            raise UserError(
                f"-sm row: {unable} cannot share a matrix with other devices", hint="-sm layer"
            )
    if options.split_mode == "tensor" and not names:
        raise UserError("-sm tensor: there is no device to split over", hint="leave out -sm tensor")
    overrides = tuple(
        TensorOverride(override.pattern, _device_of(override.buffer, names))
        for override in options.tensor_overrides
    )
    return replace(options, tensor_overrides=overrides)


def use_devices(machine: Machine, options: PlacementOptions) -> Machine:
    """Return the machine with only the devices that a run uses. Raises UserError for a device that
    is not there.
    """
    if options.devices == NO_DEVICES:
        return machine.without_devices()
    chosen = machine.devices
    if options.devices:
        chosen = tuple(_find(machine, name) for name in options.devices)
    if options.split_mode == "none" and chosen:
        if options.main_gpu < 0:
            return machine.without_devices()
        if options.main_gpu >= len(chosen):
            names = [f"{index} ({device.name})" for index, device in enumerate(chosen)]
            raise UserError(
                f"--main-gpu is {options.main_gpu}, but there are {len(chosen)} devices",
                hint=f"-mg takes one of: {', '.join(names)}",
            )
        chosen = (chosen[options.main_gpu],)
    return replace(machine, devices=chosen)


def _find(machine: Machine, name: str) -> OffloadDevice:
    """Return the device with this name."""
    for device in machine.all_devices:
        if device.name == name:
            return device
    raise UserError(f"the device {name} is not there", hint=devices_hint())


def _device_of(buffer: str, names: list[str]) -> str:
    """Return the name of the device with the buffer type `buffer`, or HOST_BUFFER. `names`: of the
    devices that the run uses. Raises UserError for all other buffers.
    """
    address = devices.find_buffer_type(buffer)
    device = devices.read_buffer_type(address).device if address is not None else ""
    if device != HOST_BUFFER and device not in names:
        problem = f"is of {device}, which this run does not use" if device else "is not there"
        raise UserError(f"--override-tensor: the buffer {buffer} {problem}", hint=buffers_hint())
    return device
