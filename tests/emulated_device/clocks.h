// Vector clocks: which work of which stream has ended before other work begins, whatever the timing.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
//
// Every stream counts the work that is queued on it. A clock holds, for each stream, the newest work that is known to
// have ended. A stream has one for the work that is queued on it next, an event has the one of its stream when it was
// recorded, and the host has one. Waiting merges clocks: what has not been merged is not ordered, however long ago it
// was queued, so that a missing wait is seen also in a run in which everything happened to be in time.
//
// All threads of the host share one clock. They hand work to each other under locks (a backward runs in a thread of
// autograd's), which are not seen here; so two threads that race with each other are not found.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>

namespace emulated {

struct VectorClock {
  std::map<int64_t, uint64_t> counts; // by stream

  bool covers(int64_t stream, uint64_t count) const {
    const auto found = counts.find(stream);
    return found != counts.end() && found->second >= count;
  }

  void merge(const VectorClock& other) {
    for (const auto& [stream, count] : other.counts) {
      uint64_t& mine = counts[stream];
      mine = std::max(mine, count);
    }
  }
};

// Guards all clocks, histories and blocks of memory. Threads of streams never take it, nor does who holds it wait for
// a stream or for Python's lock: so work that is waited for always goes on.
inline std::mutex order_mutex;

// What the host has waited for. Guarded by order_mutex.
inline VectorClock host_clock;

} // namespace emulated
