// Functions that torch needs for a device type: the current device, random numbers, and a thread for the backward.
#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_set>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include "streams.h"
#include "waits.h"

namespace simulation {
namespace {

thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = current;
    setDevice(device);
    return {kType, previous};
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override {
    if (device.index() == current) return;
    check_device(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current; }
  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kType, static_cast<c10::DeviceIndex>(index_of(device))});
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(index_of(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(index_of(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    record_event(event, stream);
  }
  void block(void* event, const c10::Stream& stream) const override { wait_event(event, stream); }
  bool queryEvent(void* event) const override {
    synchronize_event(event);  // the host knows now that the work has ended
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronize_stream(stream);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { destroy_event(event); }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_on_host(stream.device_index(), "synchronize");
    synchronize_stream(stream);
  }
  void synchronizeEvent(void* event) const override {
    wait_on_host(device_of_event(event), "synchronize");
    synchronize_event(event);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_on_host(device, "synchronize");
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    if (Block* block = block_of(pointer)) used_on(*block, stream);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Generator of one device: a CPU generator with the type of a simulated device.
struct Generator final : c10::GeneratorImpl {
  mutable at::Generator host;
  Generator(c10::Device device, at::Generator from)
      : GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(from)) {}
  template <typename Function>
  auto locked(Function function) const {
    std::lock_guard<std::mutex> lock(host.mutex());
    return function(*host.unsafeGetGeneratorImpl());
  }
  void set_current_seed(uint64_t seed) override {
    locked([&](auto& from) { from.set_current_seed(seed); });
  }
  void set_offset(uint64_t offset) override {
    locked([&](auto& from) { from.set_offset(offset); });
  }
  uint64_t get_offset() const override {
    return locked([](auto& from) { return from.get_offset(); });
  }
  uint64_t current_seed() const override {
    return locked([](auto& from) { return from.current_seed(); });
  }
  uint64_t seed() override {
    return locked([](auto& from) { return from.seed(); });
  }
  void set_state(const c10::TensorImpl& state) override {
    locked([&](auto& from) { from.set_state(state); });
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return locked([](auto& from) { return from.get_state(); });
  }
  GeneratorImpl* clone_impl() const override { return new Generator(device(), host.clone()); }
};

at::Generator new_generator(c10::DeviceIndex index, uint64_t seed) {
  return at::Generator(c10::make_intrusive<Generator>(c10::Device(kType, index), at::detail::createCPUGenerator(seed)));
}
std::array<at::Generator, kDevices>& generators = *new std::array<at::Generator, kDevices>;

// Pinned memory is memory of the CPU whose addresses are known. Tensor.is_pinned() asks for the start of a storage.
struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::unordered_set<const void*> addresses;

  struct Block {
    c10::DataPtr memory;
  };

  static PinnedMemory& instance() {
    static auto& memory = *new PinnedMemory;  // tensors may outlive everything else
    return memory;
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    {
      std::lock_guard<std::mutex> lock(instance().mutex);
      instance().addresses.erase(block->memory.get());
    }
    delete block;
  }
  bool has(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    return addresses.count(address) > 0;
  }
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{c10::GetAllocator(c10::kCPU)->allocate(size)};
    std::lock_guard<std::mutex> lock(mutex);
    addresses.insert(block->memory.get());
    return {block->memory.get(), block, &release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* target, const void* source, std::size_t size) const override { default_copy_data(target, source, size); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return index < device_count(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kType, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return Guard().exchangeDevice({kType, index}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::instance().has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::instance(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    index = index < 0 ? current : index;
    check_device(index);
    return generators[index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? current : index, c10::default_rng_seed_val);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto memory = size ? c10::GetAllocator(kType)->allocate(size) : c10::DataPtr(nullptr, storage.device());
    if (const auto kept = std::min(size, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(size);
  }
};

// The autograd engine creates its queues, one per device, at the first backward of the process. That may happen before the first
// cluster. So missing queues and threads are added here, as in Engine::start_device_threads.
struct Engine : torch::autograd::Engine {
  static auto queues() { return &Engine::device_ready_queues_; }
};

void serve_backward(int devices) {
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.initialize_device_threads_pool();
  auto& queues = engine.*Engine::queues();
  queues.reserve(kDevices);  // once, so that they do not move while another thread runs a backward
  for (int i = static_cast<int>(queues.size()); i < devices; ++i) {
    queues.push_back(std::make_shared<torch::autograd::ReadyQueue>());
    std::thread(&torch::autograd::Engine::thread_init, &engine, i, queues.back(), true).detach();
  }
}

}  // namespace

at::Tensor random_state(int64_t device) {
  check_device(static_cast<int>(device));
  return generators[device].get_state();
}

void set_random_state(int64_t device, const at::Tensor& state) {
  check_device(static_cast<int>(device));
  generators[device].set_state(state);
}

TORCH_LIBRARY(balanced_parallel_simulation, m) {
  m.def("random_state(int device) -> Tensor", &random_state);
  m.def("set_random_state(int device, Tensor state) -> ()", &set_random_state);
}

at::Generator host_generator(const at::Generator& generator) { return generator.get<Generator>()->host; }

}  // namespace simulation

extern "C" {
void simulation_start(int devices, const int64_t* capacities, bool strict, uint64_t seed) {
  static simulation::Hooks hooks;
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(&hooks);
  simulation::start(devices, capacities, strict);
  for (int i = 0; i < devices; ++i) simulation::generators[i] = simulation::new_generator(static_cast<c10::DeviceIndex>(i), seed);
  simulation::serve_backward(devices);
}
void simulation_seed(int device, uint64_t seed) { simulation::generators.at(device).set_current_seed(seed); }
void simulation_stop() {
  simulation::stop();
  simulation::current = 0;
}
}
