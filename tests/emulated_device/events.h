// Events and the current stream, as torch asks a device for them.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <memory>

#include "allocator.h"
#include "streams.h"

namespace emulated {

// A place in the queue of a stream. One that was never recorded is not waited for. Guarded by order_mutex.
struct Event {
  using Time = std::chrono::steady_clock::time_point;

  StreamQueue* stream = nullptr;
  uint64_t ticket = 0;
  VectorClock clock;
  std::shared_ptr<Time> time = std::make_shared<Time>(); // valid when the ticket is done
};

inline void record(Event& event, StreamQueue& stream) {
  std::lock_guard<std::mutex> lock(order_mutex);
  stream.clock.merge(host_clock);
  event.stream = &stream;
  event.clock = stream.clock;
  // Of its own, as the event may be recorded again before this stream comes here.
  event.time = std::make_shared<Event::Time>();
  event.ticket = stream.push([time = event.time] { *time = std::chrono::steady_clock::now(); });
}

// What is queued on the stream from now on waits for what the event stands for now.
inline void let_wait(StreamQueue& stream, const Event& event) {
  std::lock_guard<std::mutex> lock(order_mutex);
  if (event.stream == nullptr) {
    return;
  }
  stream.clock.merge(event.clock);
  stream.push([awaited = event.stream, ticket = event.ticket] { awaited->wait(ticket); });
}

inline bool has_ended(const Event& event) {
  std::lock_guard<std::mutex> lock(order_mutex);
  if (event.stream == nullptr) {
    return true;
  }
  if (!event.stream->is_done(event.ticket)) {
    return false;
  }
  host_clock.merge(event.clock); // the host has seen it
  return true;
}

inline void wait_on_host(const Event& event) {
  Event awaited;
  {
    std::lock_guard<std::mutex> lock(order_mutex);
    awaited = event;
  }
  if (awaited.stream == nullptr) {
    return;
  }
  awaited.stream->wait(awaited.ticket);
  {
    std::lock_guard<std::mutex> lock(order_mutex);
    host_clock.merge(awaited.clock);
  }
  raise_first_error();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream as_stream(int64_t number) {
    return c10::Stream(c10::Stream::UNSAFE, the_device, number);
  }

  static Event& as_event(void* event) {
    return *static_cast<Event*>(event);
  }

  c10::DeviceType type() const override {
    return device_type;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return the_device;
  }
  c10::Device getDevice() const override {
    return the_device;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return as_stream(current_stream_number);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return as_stream(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_stream(Streams::make().number);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return as_stream(Streams::make().number);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = as_stream(current_stream_number);
    current_stream_number = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    StreamQueue& queue = Streams::get(stream.id());
    std::lock_guard<std::mutex> lock(order_mutex);
    if (!queue.is_done(queue.newest())) {
      return false;
    }
    host_clock.merge(queue.clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++counters.host_synchronisations;
    emulated::wait_on_host(Streams::get(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    wait_for_device();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_pool().record_stream(data.get(), stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    emulated::record(as_event(*event), Streams::get(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      let_wait(Streams::get(stream.id()), as_event(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || has_ended(as_event(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      ++counters.host_synchronisations;
      emulated::wait_on_host(as_event(event));
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  // In milliseconds; both have to have ended.
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(has_ended(as_event(start)) && has_ended(as_event(end)), "found an event that has not ended");
    return std::chrono::duration<double, std::milli>(*as_event(end).time - *as_event(start).time).count();
  }
};

} // namespace emulated
