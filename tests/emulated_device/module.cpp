// The Python module of the emulated device, and what torch asks a device for.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <vector>

#include "collectives.h"
#include "events.h"
#include "host_accesses.h"
#include "metadata.h"
#include "settings.h"

namespace emulated {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void* data) const override {
    return pinned_pool().contains(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return the_device;
  }
  // Random numbers are those of the host (see operators.cpp).
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

std::map<std::string, int64_t> counts() {
  return {
      {"to_device_bytes", counters.to_device_bytes},
      {"to_host_bytes", counters.to_host_bytes},
      {"host_synchronisations", counters.host_synchronisations},
      {"items", counters.items},
      {"pageable_copies", counters.pageable_copies},
      {"device_bytes", device_pool().live()},
      {"peak_device_bytes", device_pool().peak()},
      {"reserved_device_bytes", device_pool().reserved()},
      {"pinned_bytes", pinned_pool().live()},
      {"peak_pinned_bytes", pinned_pool().peak()},
  };
}

void reset() {
  counters.to_device_bytes = 0;
  counters.to_host_bytes = 0;
  counters.host_synchronisations = 0;
  counters.items = 0;
  counters.pageable_copies = 0;
  {
    std::lock_guard<std::mutex> lock(counters.mutex);
    counters.waited_operators.clear();
  }
  device_pool().reset_peak();
  pinned_pool().reset_peak();
  std::lock_guard<std::mutex> lock(order_mutex);
  races.clear();
}

void configure(
    double to_device_bandwidth, double to_host_bandwidth, double link_bandwidth, double copy_delay,
    double collective_delay, double compute_delay, size_t limit) {
  settings.to_device_bandwidth = to_device_bandwidth;
  settings.to_host_bandwidth = to_host_bandwidth;
  settings.link_bandwidth = link_bandwidth;
  settings.copy_delay = copy_delay;
  settings.collective_delay = collective_delay;
  settings.compute_delay = compute_delay;
  device_pool().set_limit(limit);
}

} // namespace
} // namespace emulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  watch_host_accesses();
  m.def("configure", &configure, without_gil);
  m.def("counts", &counts, without_gil);
  m.def("reset", &reset, without_gil);
  m.def("reset_peak", [] { device_pool().reset_peak(); }, without_gil);
  m.def("synchronize", &wait_for_device, without_gil);
  m.def("empty_cache", [] { device_pool().empty_cache(); }, without_gil);
  m.def("sleep", [](double seconds) {
    enqueue(current_stream(), {}, "sleep", [seconds] { sleep_for(seconds); });
  }, without_gil);
  m.def("register_host_memory", [](uintptr_t data, size_t size) {
    pinned_pool().adopt(reinterpret_cast<void*>(data), size);
  });
  m.def("unregister_host_memory", [](uintptr_t data) { pinned_pool().disown(reinterpret_cast<void*>(data)); });
  m.def("races", [] {
    std::lock_guard<std::mutex> lock(order_mutex);
    return races;
  });
  m.def("waited_operators", [] {
    std::lock_guard<std::mutex> lock(counters.mutex);
    return counters.waited_operators;
  });
  // Groups are made with the time-out that the options of their world have.
  py::class_<DeviceBackend, c10d::Backend, c10::intrusive_ptr<DeviceBackend>>(m, "DeviceBackend")
      .def_property_readonly("options", [](DeviceBackend& backend) { return backend.getBackendOptions(); });
  m.def("on_streams", [](c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::make_intrusive<DeviceBackend>(std::move(gloo));
  });
}
