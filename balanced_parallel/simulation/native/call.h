// Conversion of an operator's arguments to CPU tensors on the same memory, and of its results back to simulated devices.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "ledger.h"

namespace simulation {

inline bool is_simulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }
inline int place(const at::Tensor& tensor) { return is_simulated(tensor) ? tensor.device().index() : kHost; }

// Excludes autograd and autocast while a CPU kernel runs for a simulated device.
struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

inline at::Tensor laid_out(at::Tensor tensor, const at::Tensor& like) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

inline at::Tensor new_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  return laid_out(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype()), like);
}

// A view has the keys of its base, so it is an inference tensor if and only if its base is one.
inline at::Tensor new_view(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  return laid_out(at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype()), like);
}

// Returns a CPU pointer to the memory of a storage. The pointer owns a reference to the storage.
inline c10::DataPtr host_memory(const c10::Storage& storage) {
  return {
      storage.mutable_data(), new c10::Storage(storage), [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::kCPU};
}

// One call of an operator: converts arguments to CPU tensors on the same memory, and results back.
class Call {
 public:
  explicit Call(int device = -1) : device_(device) {}

  int device() const { return device_; }

  // Finds the one device that the operator runs on.
  void look(const at::Tensor& tensor) {
    if (!is_simulated(tensor)) return;
    const int index = tensor.device().index();
    if (device_ == -1) device_ = index;
    has_tensors_ = true;
  }
  void look(c10::Device device) {
    if (device.type() != kType) return;
    device_ = device.has_index() ? device.index() : c10::impl::VirtualGuardImpl(kType).getDevice().index();
  }

  // Returns a CPU tensor on the same memory, or the tensor itself if it is on the CPU. Raises an error for a tensor of an earlier
  // cluster, unless it is copied to the CPU.
  at::Tensor to_host(const at::Tensor& tensor, bool only_read = false) {
    if (!is_simulated(tensor)) return tensor;
    for (const auto& known : tensors_)
      if (known.simulated.is_same(tensor)) return known.host;
    const auto& storage = tensor.storage();
    const Block* block = block_of(storage);
    TORCH_CHECK(
        only_read || !block || block->cluster == current_cluster(),
        "This tensor is on ", tensor.device(), " of a cluster that has ended: it can be copied to the CPU, with .cpu(), but not "
        "be used.");
    auto host = new_tensor(host_storage(tensor), c10::DispatchKey::CPU, tensor);
    tensors_.push_back({tensor, host});
    return host;
  }

  // Converts the result of a kernel: an argument, a view of one, or new memory, which is counted from here on.
  at::Tensor from_host(const at::Tensor& host) {
    if (!host.defined() || host.device().type() != c10::kCPU) return host;
    for (const auto& known : tensors_)
      if (known.host.is_same(host)) return known.simulated;
    const auto& storage = host.storage();
    auto* impl = storage.unsafeGetStorageImpl();
    for (const auto& known : storages_)
      if (known.host.unsafeGetStorageImpl() == impl) return new_view(known.simulated, known.keys, host);
    c10::Storage simulated(
        c10::Storage::use_byte_size_t(), storage.nbytes(), adopt(host_memory(storage), storage.nbytes(), device_),
        c10::GetAllocator(kType), true);
    const auto made = new_tensor(simulated, c10::DispatchKey::PrivateUse1, host);
    storages_.push_back({simulated, storage, made.key_set()});
    return made;
  }

  // Updates a tensor that a kernel has written to: its size may have changed, and its memory has a new category.
  void written(const at::Tensor& tensor) {
    if (!is_simulated(tensor)) return;
    const auto host = to_host(tensor);
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (host.storage().data() != storage->data()) {
      auto* from = host.storage().unsafeGetStorageImpl();
      const auto bytes = from->nbytes();
      storage->set_data_ptr_noswap(adopt(from->set_data_ptr(c10::DataPtr()), bytes, tensor.device().index()));
      storage->set_nbytes(bytes);
    }
    if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides() || host.storage_offset() != tensor.storage_offset())
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    Block* block = block_of(tensor.storage());
    if (block && block->fresh && has_tensors_) {
      block->fresh = false;
      if (block->category == Category::Inputs) block->category = computed();
    }
  }

 private:
  struct TensorPair {
    at::Tensor simulated, host;
  };
  struct StoragePair {
    c10::Storage simulated, host;
    c10::DispatchKeySet keys;
  };
  int device_;
  bool has_tensors_ = false;
  c10::SmallVector<TensorPair, 8> tensors_;
  c10::SmallVector<StoragePair, 8> storages_;

  c10::Storage host_storage(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    for (const auto& known : storages_)
      if (known.simulated.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return known.host;
    c10::Storage host(
        c10::Storage::use_byte_size_t(), storage.nbytes(), host_memory(storage), c10::GetAllocator(c10::kCPU), true);
    const auto lazy = c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
    storages_.push_back({storage, host, tensor.key_set() - lazy - c10::python_ks});
    return host;
  }
};

// Calls `function` with each tensor in an argument, and with a function that replaces it.
template <typename Function>
void visit(c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    function(value.toTensor(), [&](at::Tensor by) { value = std::move(by); });
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) function(tensor, [&](at::Tensor by) { tensor = std::move(by); });
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      if (tensor) function(*tensor, [&](at::Tensor by) { tensor = std::move(by); });
      list.push_back(tensor);
    }
    value = std::move(list);
  } else if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {  // an argument of collectives
    c10::List<c10::List<at::Tensor>> lists;
    for (c10::IValue list : value.toListRef()) {
      visit(list, function);
      lists.push_back(list.toTensorList());
    }
    value = std::move(lists);
  }
}

}  // namespace simulation
