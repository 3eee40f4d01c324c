// Finds operators of the CPU that use pinned memory before the device is done with it.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
//
// Copies from and to pinned memory do not block, so reading a result or overwriting a source needs a wait like anything
// on the device. torch calls an observer before each operator. What reads memory without an operator (numpy(),
// tolist(), data_ptr()) is not seen.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <memory>
#include <vector>

#include "work.h"

namespace emulated {

inline void collect_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      tensors.push_back(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor.value_or(at::Tensor()));
    }
  }
}

// Whether an operator reads or writes data of CPU tensors itself. Those that are made of others call these, and those
// that return views, or change where a tensor's data are, read nothing.
inline bool touches_data(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  if (name == "aten::copy_") {
    return true; // the same for all devices, so that it has no kernel of the CPU's
  }
  if (name == "aten::set_" || name == "aten::resize_" || !op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return false;
  }
  for (const c10::Argument& returned : op.schema().returns()) {
    if (returned.alias_info() != nullptr && !returned.alias_info()->isWrite()) {
      return false;
    }
  }
  return true;
}

inline std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  if (is_stream_thread || pinned_pool().live() == 0) {
    return nullptr;
  }
  const auto name = call.operator_name();
  const auto op = name.has_value() ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!op.has_value() || !touches_data(*op)) {
    return nullptr;
  }
  const auto& arguments = op->schema().arguments();
  std::vector<std::pair<at::Tensor, bool>> used;
  for (size_t index = 0; index < std::min(call.inputs().size(), arguments.size()); ++index) {
    const c10::AliasInfo* alias = arguments[index].alias_info();
    std::vector<at::Tensor> tensors;
    collect_tensors(call.inputs()[index], tensors);
    for (const at::Tensor& tensor : tensors) {
      if (is_on_device(tensor)) {
        return nullptr; // a copy that is queued: it says itself what it uses
      }
      if (tensor.defined() && tensor.device().is_cpu() && tensor.has_storage()) {
        used.emplace_back(tensor, alias != nullptr && alias->isWrite());
      }
    }
  }
  std::lock_guard<std::mutex> lock(order_mutex);
  for (const auto& [tensor, is_written] : used) {
    const Access access = access_of(tensor, is_written);
    const Block* block = access.begin == access.end ? nullptr : pinned_pool().find(access.begin);
    if (block != nullptr) {
      block->history.check_host(access, name->name);
    }
  }
  return nullptr;
}

inline void watch_host_accesses() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(&before_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

} // namespace emulated
