// Lets a PyTorch without CUDA pretend that it has devices: FakeTensorMode asks for a device guard, and this one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
}
