// What a test can set, and what it can count.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace emulated {

struct Settings {
  std::atomic<double> to_device_bandwidth{0}; // bytes a second; 0: not limited
  std::atomic<double> to_host_bandwidth{0};
  std::atomic<double> link_bandwidth{0}; // to other ranks
  // Seconds that each one takes longer than it would.
  std::atomic<double> copy_delay{0};
  std::atomic<double> collective_delay{0};
  std::atomic<double> compute_delay{0};
};

struct Counters {
  std::atomic<int64_t> to_device_bytes{0};
  std::atomic<int64_t> to_host_bytes{0};
  std::atomic<int64_t> host_synchronisations{0}; // of whatever kind: the host waited for a stream
  std::atomic<int64_t> items{0};
  std::atomic<int64_t> pageable_copies{0};
  // Operators for which the host waited although it would not with CUDA: they draw random numbers, or there is no way
  // to know the shapes of their results before they have run. By name, guarded by mutex.
  std::map<std::string, int64_t> waited_operators;
  std::mutex mutex;
};

inline Settings settings;
inline Counters counters;

} // namespace emulated
