// CPU tensors over the memory of device tensors, which kernels of the CPU compute with.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <unordered_map>

#include "work.h"

namespace emulated {

// They do not keep the memory: like a kernel of CUDA's, work has addresses only, and the rules of the allocator must
// make sure that nobody else uses the memory. So a thread of a stream never owns a tensor that Python knows, whose end
// needs Python's lock, and who holds this lock can wait for the stream.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!is_on_device(tensor)) {
      return copied(tensor);
    }
    // Tensors of one storage share one here, too: operators check whether what they write overlaps what they read.
    auto& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = c10::Storage(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
          c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU)));
    }
    at::Tensor alias = at::detail::make_tensor<at::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return alias;
  }

 private:
  // Numbers in host memory are read when work is queued, as arguments of a kernel are.
  static at::Tensor copied(const at::Tensor& tensor) {
    at::Tensor copy = at::clone(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      copy.unsafeGetTensorImpl()->set_wrapped_number(true); // of Python: it does not decide the type of a result
    }
    return copy;
  }

  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

// A tensor on the device with the shape of another one.
inline at::Tensor allocate_like(const at::Tensor& shape) {
  const auto options = at::TensorOptions().dtype(shape.scalar_type()).device(the_device);
  return shape.is_non_overlapping_and_dense() ? at::empty_strided(shape.sizes(), shape.strides(), options)
                                              : at::empty(shape.sizes(), options);
}

} // namespace emulated
