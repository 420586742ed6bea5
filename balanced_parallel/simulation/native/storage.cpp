// Allocation and copies of memory on simulated devices.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <torch/library.h>

#include "call.h"
#include "streams.h"
#include "waits.h"

namespace simulation {
namespace {

constexpr auto kSimulated = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kType), kSimulated, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kType), kSimulated, c10::dtype_or_default(dtype));
}

// Zeros without memory, which autograd uses for gradients that are zero.
struct NoMemory final : c10::Allocator {
  c10::Device device;
  explicit NoMemory(c10::Device where) : device(where) {}
  c10::DataPtr allocate(size_t) override { return {nullptr, device}; }
  void copy_data(void*, const void*, size_t) const override {}
};

at::Tensor zeros_without_memory(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  NoMemory nothing(c10::impl::VirtualGuardImpl(kType).getDevice());
  return at::detail::empty_generic(
      size, &nothing, kSimulated | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor), c10::dtype_or_default(dtype), std::nullopt);
}

// Sets the category of a copy: that of a source on another device, else the category of the operator that copies.
void label_copy(const at::Tensor& target, const at::Tensor& source) {
  Block* to = is_simulated(target) ? block_of(target.storage()) : nullptr;
  Block* from = is_simulated(source) ? block_of(source.storage()) : nullptr;
  if (from && from->category == Category::Inputs && source.is_leaf() && source.requires_grad()) from->category = Category::Parameters;
  if (to && from && to->fresh) {
    if (to->device != from->device && !in_backward()) to->category = from->category.load();
    else if (to->category == Category::Inputs) to->category = computed();
  }
  if (to) to->fresh = false;
}

// A copy between devices runs on the current stream of the source, as in torch.
void order_copy(const at::Tensor& self, const at::Tensor& source, int device) {
  const Launch launch(device);
  if (is_simulated(source)) launch.reads(block_of(source.storage()), "A copy");
  if (is_simulated(self)) launch.writes(block_of(self.storage()), "A copy");
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  Call call;
  const auto host_source = call.to_host(source, !is_simulated(self)), host_self = call.to_host(self);
  const int from = place(source), to = place(self);
  report_copy(self, source, non_blocking);
  const bool between = from != to && from != kHost && to != kHost;
  if (between) wait_for_each_other(from, to);
  order_copy(self, source, from == kHost ? to : from);
  {
    BelowEverything guard;
    host_self.copy_(host_source);
  }
  if (between) wait_for_each_other(from, to);
  if (to == kHost && !non_blocking) synchronize_stream(current_stream(from));
  if (from != to) move_bytes(place(source), place(self), static_cast<int64_t>(self.nbytes()));
  label_copy(self, source);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  auto written = target;
  return copy_(written, self, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  auto written = target;
  written.resize_(self.sizes());
  return copy_(written, self, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Call call;
  wait_on_host(place(self), "item");
  Launch(place(self)).reads(block_of(self.storage()), "Reading a number");
  synchronize_stream(current_stream(place(self)));
  move_bytes(place(self), kHost, static_cast<int64_t>(self.element_size()));
  return at::_local_scalar_dense(call.to_host(self));
}

at::Tensor& set_storage_at(
    at::Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_at(self, std::move(source), 0, length, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto nothing = empty({0}, at::kByte, std::nullopt, self.device(), std::nullopt, std::nullopt);
  return set_storage_at(self, nothing.storage(), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (Block* block = block_of(self.storage())) used_on(*block, stream);
}

// Module.to() keeps Parameter objects if the tensor types are compatible, as those of the CPU and CUDA are.
bool same_type_of_storage(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zeros_without_memory);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &same_type_of_storage);
}

}  // namespace
}  // namespace simulation
