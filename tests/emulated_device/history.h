// The history of a block of memory: which work has read and written which of its bytes, to find races.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
//
// Two accesses race if they share a byte, at least one of them writes, and the later one is not ordered after the
// earlier one. The history stays with a block when it is given to another tensor: memory that a stream may still read
// when its next owner writes to it is a race like any other.
//
// A tensor that is not contiguous counts as all bytes from its first to its last. So columns of one matrix that two
// streams use at the same time are reported, although they share no byte.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "clocks.h"

namespace emulated {

struct Access {
  const char* begin;
  const char* end;
  bool writes;
};

// Descriptions of all races that were found. Guarded by order_mutex.
inline std::vector<std::string> races;

class History {
 public:
  // Adds what work number `count` of a stream does, `clock` being that of the stream. Guarded by order_mutex.
  void add(const Access& access, int64_t stream, uint64_t count, const VectorClock& clock, const std::string& work) {
    std::vector<Record> kept;
    for (Record& record : records_) {
      const bool ordered = record.stream == stream || clock.covers(record.stream, record.count);
      if (!ordered && conflict(access, record.access)) {
        report(work + " on stream " + std::to_string(stream), access, record);
      }
      // What is ordered after this access is ordered after all that this access is ordered after. So what it covers
      // can be forgotten, except that a read does not stand for a write: reads that follow must be compared with it.
      const bool covered = access.begin <= record.access.begin && record.access.end <= access.end;
      if (!(covered && (ordered || access.writes) && (access.writes || !record.access.writes))) {
        kept.push_back(std::move(record));
      }
    }
    kept.push_back({access, stream, count, work, false});
    records_ = std::move(kept);
  }

  // The host's own accesses are not added: all work that is queued later is ordered after them. Guarded by order_mutex.
  void check_host(const Access& access, const std::string& work) const {
    for (const Record& record : records_) {
      if (conflict(access, record.access) && !host_clock.covers(record.stream, record.count)) {
        report(work + " on the host", access, record);
      }
    }
  }

  // The memory is given back. Guarded by order_mutex.
  void end_tenancy() {
    for (Record& record : records_) {
      record.is_of_earlier_tensor = true;
    }
  }

  // Forgets what has ended before anybody may use the memory again. Guarded by order_mutex.
  void forget(const VectorClock& ended) {
    std::vector<Record> kept;
    for (Record& record : records_) {
      if (!ended.covers(record.stream, record.count)) {
        kept.push_back(std::move(record));
      }
    }
    records_ = std::move(kept);
  }

 private:
  struct Record {
    Access access;
    int64_t stream;
    uint64_t count;
    std::string work;
    bool is_of_earlier_tensor;
  };

  static bool conflict(const Access& one, const Access& other) {
    return one.begin < other.end && other.begin < one.end && (one.writes || other.writes);
  }

  static void report(const std::string& work, const Access& access, const Record& record) {
    races.push_back(
        work + (access.writes ? " writes" : " reads") + " memory that " + record.work + " on stream " +
        std::to_string(record.stream) + (record.access.writes ? " writes" : " reads") + ", without waiting for it" +
        (record.is_of_earlier_tensor ? "; the memory was another tensor's then" : ""));
  }

  std::vector<Record> records_;
};

} // namespace emulated
