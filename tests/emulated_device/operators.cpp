// How operators run on the device: CPU kernels, by threads of streams, on the memory of the device.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
//
// The host only queues an operator, as with CUDA, so that it is ahead of the device and a missing wait gives wrong
// values as soon as something is delayed. It has to know the shapes of the results, and allocates them: it runs the
// operator with tensors of torch's meta device first, which have a shape and no data. Where this is not possible, as
// with nonzero(), the host waits for the operator and allocates afterwards; so it does for operators that draw random
// numbers, which use the generator of the host and would otherwise depend on how far the device is.
//
// Operators that return views are run at once, as they read no data.
#include <Python.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "aliases.h"
#include "copies.h"
#include "metadata.h"
#include "shape_cache.h"
#include "work.h"

namespace emulated {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// A value with other tensors in the place of its tensors, and another device in the place of this one.
template <typename Change>
IValue with_tensors(const IValue& value, c10::DeviceType device, Change&& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) {
      changed.push_back(change(tensor));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor.has_value() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  if (value.isDevice() && value.toDevice().type() == device_type) {
    return c10::Device(device);
  }
  return value;
}

template <typename Visit>
void for_each_tensor(const IValue& value, Visit&& visit) {
  with_tensors(value, device_type, [&](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_view(const c10::Argument& returned) {
  return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
}

// Where an operator that writes to an argument also returns it: which one.
size_t returned_argument(const c10::FunctionSchema& schema, const c10::Argument& returned) {
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    const c10::AliasInfo* alias = schema.arguments()[index].alias_info();
    if (alias != nullptr && alias->beforeSets() == returned.alias_info()->beforeSets()) {
      return index;
    }
  }
  TORCH_CHECK(false, "found no argument that ", schema.operator_name(), " returns");
}

// Tensors in host memory count as numbers if they have no dimension; indices may be there, too.
void refuse_mixed_devices(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  for (const IValue& argument : arguments) {
    if (argument.isOptionalTensorList()) {
      continue;
    }
    for_each_tensor(argument, [&](const Tensor& tensor) {
      TORCH_CHECK(
          !tensor.defined() || is_on_device(tensor) || tensor.dim() == 0,
          "Expected all tensors to be on the same device, but found at least two devices, ", the_device, " and ",
          tensor.device(), " (in ", schema.operator_name(), ")");
    });
  }
}

void make_views(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, Stack* stack) {
  Aliases aliases;
  Stack call;
  Tensor viewed;
  for (const IValue& argument : arguments) {
    call.push_back(with_tensors(argument, c10::kCPU, [&](const Tensor& tensor) {
      viewed = viewed.defined() ? viewed : tensor;
      return aliases.of(tensor);
    }));
  }
  op.callBoxed(&call);
  for (const IValue& result : call) {
    stack->push_back(with_tensors(result, c10::kCPU, [&](const Tensor& shape) {
      Tensor view = at::detail::make_tensor<at::TensorImpl>(
          at::TensorImpl::VIEW, c10::Storage(viewed.storage()), viewed.key_set(), shape.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
      return view;
    }));
  }
}

bool is_of_tensors(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType ||
      (type.kind() == c10::TypeKind::ListType && type.containedType(0)->kind() == c10::TypeKind::TensorType);
}

bool returns_tensors_only(const c10::FunctionSchema& schema) {
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& returned) {
    return is_of_tensors(*returned.type());
  });
}

bool depends_on_data(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
      !returns_tensors_only(op.schema());
}

// The shapes of the results, by tensors without data.
Shapes find_shapes(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  Shapes shapes;
  if (depends_on_data(op) || op.hasTag(at::Tag::nondeterministic_seeded)) {
    return shapes;
  }
  // In low precision the kernel of the CPU has statistics of another type than torch says that devices have.
  if (op.operator_name().name == "aten::native_layer_norm" && arguments[0].toTensor().itemsize() == 2) {
    return shapes;
  }
  for (const IValue& argument : arguments) {
    shapes.arguments.push_back(with_tensors(argument, c10::kMeta, [](const Tensor& tensor) {
      const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kMeta);
      return is_on_device(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), options) : tensor;
    }));
  }
  Stack call(shapes.arguments);
  try {
    op.callBoxed(&call);
  } catch (const c10::Error&) {
    // It may also be wrong: then its CPU kernel says so, in words that are about what the program does.
    return shapes;
  } catch (const std::exception&) {
    const PyGILState_STATE state = PyGILState_Ensure(); // shapes of some operators are found by Python
    PyErr_Clear();
    PyGILState_Release(state);
    return shapes;
  }
  shapes.are_known = true;
  shapes.results = call;
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (!writes(op.schema().arguments()[index])) {
      shapes.arguments[index] = IValue(); // not kept: it may be a tensor of the program
    }
  }
  return shapes;
}

// Resizes what an operator is to write its results to.
void resize_written(
    const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const std::vector<IValue>& shapes) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (writes(op.schema().arguments()[index]) && arguments[index].isTensor()) {
      const Tensor tensor = arguments[index].toTensor();
      const Tensor shape = shapes[index].toTensor();
      if (tensor.defined() && tensor.sizes() != shape.sizes()) {
        emulated::resize(tensor, shape.sizes(), std::nullopt);
      }
    }
  }
}

void run_kernel(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(stack);
}

void write_result(const c10::OperatorHandle& op, const Tensor& target, const Tensor& result) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!target.defined()) {
    return; // nobody asked for it
  }
  TORCH_CHECK(
      result.defined() && target.sizes() == result.sizes() && target.dtype() == result.dtype(),
      op.operator_name(), " returned another shape than was expected");
  target.copy_(result);
}

// One operator that is to run, with what it reads and writes.
struct Call {
  const c10::OperatorHandle& op;
  const std::vector<IValue>& arguments;
  std::string name;
  std::vector<Access> accesses;
  std::shared_ptr<Stack> stack = std::make_shared<Stack>();

  Call(const c10::OperatorHandle& op, const std::vector<IValue>& arguments)
      : op(op), arguments(arguments), name(op.operator_name().name) {
    Aliases aliases;
    for (size_t index = 0; index < arguments.size(); ++index) {
      const bool is_written = writes(op.schema().arguments()[index]);
      stack->push_back(with_tensors(arguments[index], c10::kCPU, [&](const Tensor& tensor) {
        if (is_on_device(tensor)) {
          accesses.push_back(access_of(tensor, is_written));
        }
        return aliases.of(tensor);
      }));
    }
  }
};

// Queues an operator whose results have known shapes.
void queue_operator(Call call, const Stack& shapes, Stack* stack) {
  const auto& returns = call.op.schema().returns();
  Aliases aliases;
  // Where to write each of the results that are not arguments.
  auto targets = std::make_shared<std::vector<std::pair<size_t, std::vector<Tensor>>>>();
  for (size_t index = 0; index < returns.size(); ++index) {
    if (writes(returns[index])) {
      stack->push_back(call.arguments[returned_argument(call.op.schema(), returns[index])]);
      continue;
    }
    std::vector<Tensor> written;
    stack->push_back(with_tensors(shapes[index], device_type, [&](const Tensor& shape) {
      const Tensor result = shape.defined() ? allocate_like(shape) : shape;
      if (result.defined()) {
        call.accesses.push_back(access_of(result, true));
      }
      written.push_back(aliases.of(result));
      return result;
    }));
    targets->emplace_back(index, std::move(written));
  }
  enqueue(current_stream(), call.accesses, call.name, [op = call.op, stack = call.stack, targets] {
    for (const auto& result : *targets) {
      for (const Tensor& target : result.second) {
        if (target.defined() && target.numel() > 0) {
          std::memset(const_cast<void*>(target.storage().data()), nan_byte, target.storage().nbytes());
        }
      }
    }
    sleep_for(settings.compute_delay);
    run_kernel(op, stack.get());
    for (const auto& result : *targets) {
      size_t position = 0;
      for_each_tensor(stack->at(result.first), [&](const Tensor& tensor) {
        write_result(op, result.second.at(position++), tensor);
      });
    }
  });
}

// Runs an operator and waits for it.
void run_operator(const Call& call, Stack* stack) {
  {
    std::lock_guard<std::mutex> lock(counters.mutex);
    ++counters.waited_operators[call.name];
  }
  counters.host_synchronisations += depends_on_data(call.op) ? 1 : 0;
  auto error = std::make_shared<std::exception_ptr>();
  enqueue(current_stream(), call.accesses, call.name, [op = call.op, stack = call.stack, error] {
    sleep_for(settings.compute_delay);
    try {
      run_kernel(op, stack.get());
    } catch (...) {
      *error = std::current_exception();
    }
  });
  wait_on_host(current_stream());
  if (*error) {
    std::rethrow_exception(*error);
  }
  const auto& returns = call.op.schema().returns();
  for (size_t index = 0; index < returns.size(); ++index) {
    if (writes(returns[index])) {
      stack->push_back(call.arguments[returned_argument(call.op.schema(), returns[index])]);
      continue;
    }
    stack->push_back(with_tensors(call.stack->at(index), device_type, [&](const Tensor& result) {
      if (!result.defined()) {
        return result;
      }
      const Tensor target = allocate_like(result);
      enqueue(
          current_stream(), {access_of(target, true)}, call.name,
          [op = call.op, to = Aliases().of(target), result] { write_result(op, to, result); });
      return target;
    }));
  }
}

void on_device(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::FunctionSchema& schema = op.schema();
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  const std::vector<IValue> arguments(first, stack->end());
  stack->erase(first, stack->end());
  if (!schema.returns().empty() && is_view(schema.returns()[0])) {
    make_views(op, arguments, stack);
    return;
  }
  refuse_mixed_devices(schema, arguments);
  static ShapeCache cache;
  const Shapes shapes = cache.of(op, arguments, [&] { return find_shapes(op, arguments); });
  if (shapes.are_known) {
    resize_written(op, arguments, shapes.arguments);
  }
  Call call(op, arguments); // with memory of what was resized
  if (shapes.are_known) {
    queue_operator(std::move(call), shapes.results, stack);
  } else {
    run_operator(call, stack);
  }
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_device>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// The operators of transformers that autocast runs in half precision on CUDA, and those that it runs in fp32.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss_nd, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32_set_opt_dtype)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32_set_opt_dtype)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage_and_shape);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_number);
  // Of these torch would look for one that is written for the device, or make it of others, with other rounding.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&on_device>());
  m.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&on_device>());
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&on_device>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&on_device>());
}

} // namespace emulated
