"""Edits after which Horovod's threads sleep while they wait, rather than poll.

Horovod 0.28.1 keeps a core busy in three places. ``synchronize`` polls until a tensor is reduced.
The background thread synchronizes with the other ranks' threads every millisecond, whether or not
there is something to reduce, and waits for them inside MPI, which polls. On a CPU all of this takes
time from the cores that compute gradients, and on a busy machine each poll has to wait for its
turn.

With these edits ``synchronize`` sleeps until the background thread wakes it. The background thread
sleeps until a tensor is queued, or for one cycle time, which is 20 ms unless ``HOROVOD_CYCLE_TIME``
sets it. While it waits for other ranks, it sleeps between checks for a tenth of the time that it
has already waited.

``HVKIT_BLOCKING_WAITS=1`` turns this on, and ``hvkit.init`` sets it.
"""

from hvkit.build.edits.source_edits import Edit

_WHY = "Horovod's threads keep cores busy that compute gradients, and are late on a busy machine"
_UPSTREAM = "written for ranks on GPUs, with cores to spare"

_QUEUE = "horovod/common/tensor_queue"
_CONTROLLER = "horovod/common/mpi/mpi_controller.cc"
_HANDLES = "horovod/torch/handle_manager"


def _wait(name: str, file: str, what: str, old: str, new: str) -> Edit:
    return Edit(name, file, what, _WHY, _UPSTREAM, old, new)


WAITS = (
    _wait(
        "waits declared",
        f"{_QUEUE}.h",
        "functions to wait for queued tensors",
        """\
class TensorQueue {
public:
  TensorQueue() = default;
""",
        """\
// Whether threads sleep while they wait: HVKIT_BLOCKING_WAITS=1.
bool BlockingWaits();

// Called by the background thread only: returns when a tensor is queued in any process set, or
// after a cycle. If tensors wait for other ranks already, returns at once, and, if that does not
// help, after pauses that grow up to a millisecond.
void AwaitTensors(bool tensors_wait, std::chrono::microseconds cycle);

class TensorQueue {
public:
  TensorQueue() = default;
  bool HasTensors() const;
""",
    ),
    _wait(
        "waits declared, include",
        f"{_QUEUE}.h",
        "the header of durations",
        "#include <iostream>\n",
        "#include <chrono>\n#include <iostream>\n",
    ),
    _wait(
        "waits defined",
        f"{_QUEUE}.cc",
        "the same functions, and a condition that queued tensors set",
        "// Add a TensorTableEntry as well as its message to the queue.\n",
        """\
namespace {

std::mutex queued_mutex;
std::condition_variable queued_condition;
bool queued = false;

void AnnounceTensors() {
  {
    std::lock_guard<std::mutex> guard(queued_mutex);
    queued = true;
  }
  queued_condition.notify_one();
}

} // namespace

bool BlockingWaits() {
  static const bool blocking = [] {
    const char* value = std::getenv("HVKIT_BLOCKING_WAITS");
    return value != nullptr && std::string(value) == "1";
  }();
  return blocking;
}

void AwaitTensors(bool tensors_wait, std::chrono::microseconds cycle) {
  static std::chrono::microseconds pause(0);
  const std::chrono::microseconds longest = std::min(cycle, std::chrono::microseconds(1000));
  std::unique_lock<std::mutex> lock(queued_mutex);
  if (!tensors_wait || queued) {
    queued_condition.wait_for(lock, cycle, [] { return queued; });
    pause = std::chrono::microseconds(0);
  } else if (pause.count() == 0) {
    pause = std::min(longest, std::chrono::microseconds(50));
  } else {
    queued_condition.wait_for(lock, pause, [] { return queued; });
    pause = std::min(longest, 2 * pause);
  }
  queued = false;
}

bool TensorQueue::HasTensors() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return !tensor_table_.empty();
}

// Add a TensorTableEntry as well as its message to the queue.
""",
    ),
    _wait(
        "waits defined, includes",
        f"{_QUEUE}.cc",
        "the headers of the condition",
        "#include <assert.h>\n",
        "#include <algorithm>\n#include <assert.h>\n#include <condition_variable>\n"
        "#include <cstdlib>\n#include <string>\n",
    ),
    _wait(
        "one tensor wakes the background thread",
        f"{_QUEUE}.cc",
        "a queued tensor sets the condition",
        "  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        "  message_queue_.push(std::move(message));\n  AnnounceTensors();\n"
        "  return Status::OK();\n",
    ),
    _wait(
        "several tensors wake the background thread",
        f"{_QUEUE}.cc",
        "a queued group of tensors sets the condition",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  AnnounceTensors();\n"
        "  return Status::OK();\n",
    ),
    _wait(
        "the background thread waits for tensors",
        "horovod/common/operations.cc",
        "the background thread sleeps until a tensor is queued",
        """\
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
  state.last_cycle_start""",
        """\
  if (BlockingWaits()) {
    bool tensors_wait = false;
    for (auto id : state.process_set_table.Ids()) {
      tensors_wait |= state.process_set_table.Get(id).tensor_queue.HasTensors();
    }
    static const bool cycle_chosen = std::getenv("HOROVOD_CYCLE_TIME") != nullptr ||
                                     std::getenv("HOROVOD_AUTOTUNE") != nullptr;
    const double cycle_ms = cycle_chosen ? state.parameter_manager.CycleTimeMs() : 20.;
    AwaitTensors(tensors_wait, std::chrono::microseconds(long(cycle_ms * 1000.)));
  } else if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
  state.last_cycle_start""",
    ),
    _wait(
        "wait for other ranks",
        _CONTROLLER,
        "a function that waits for a request of MPI's and sleeps between two looks",
        """\
void MPIController::CrossRankBitwiseAnd(std::vector<long long>& bitvector,
                                        int count) {
""",
        """\
namespace {

// Reduce a bit vector; sleep while other ranks' background threads are not here yet.
int ReduceBits(long long* bits, int count, MPI_Op op, MPI_Comm comm) {
  // MPI matches no MPI_Allreduce of a rank that polls, so all ranks make this call.
  MPI_Request request;
  int code = MPI_Iallreduce(MPI_IN_PLACE, bits, count, MPI_LONG_LONG_INT, op, comm, &request);
  if (code != MPI_SUCCESS) {
    return code;
  }
  if (!BlockingWaits()) {
    return MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
#ifdef __linux__
  // Linux lets a thread sleep 50 us longer than it wants to, unless the thread objects.
  static thread_local const int slack = prctl(PR_SET_TIMERSLACK, 1000);
  (void)slack;
#endif
  const auto start = std::chrono::steady_clock::now();
  const auto most = std::chrono::microseconds(500);
  for (int looks = 0;; ++looks) {
    int done = 0;
    code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS || done) {
      return code;
    }
    if (looks >= 8) {
      const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(
          std::chrono::steady_clock::now() - start);
      std::this_thread::sleep_for(
          std::min(most, std::max(waited / 10, std::chrono::microseconds(10))));
    }
  }
}

} // namespace

void MPIController::CrossRankBitwiseAnd(std::vector<long long>& bitvector,
                                        int count) {
""",
    ),
    _wait(
        "wait for other ranks, includes",
        _CONTROLLER,
        "the headers of that function",
        "#include <numeric>\n",
        """\
#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#ifdef __linux__
#include <sys/prctl.h>
#endif
""",
    ),
    _wait(
        "wait for other ranks' tensors",
        _CONTROLLER,
        "ranks find the tensors that all have queued with that function",
        """\
  int ret_code = MPI_Allreduce(MPI_IN_PLACE, bitvector.data(), count,
                               MPI_LONG_LONG_INT, MPI_BAND, mpi_ctx_.mpi_comm);
""",
        """\
  int ret_code = ReduceBits(bitvector.data(), count, MPI_BAND, mpi_ctx_.mpi_comm);
""",
    ),
    _wait(
        "wait for other ranks' flags",
        _CONTROLLER,
        "ranks find the tensors that any has changed with that function",
        """\
  int ret_code = MPI_Allreduce(MPI_IN_PLACE, bitvector.data(), count,
                               MPI_LONG_LONG_INT, MPI_BOR, mpi_ctx_.mpi_comm);
""",
        """\
  int ret_code = ReduceBits(bitvector.data(), count, MPI_BOR, mpi_ctx_.mpi_comm);
""",
    ),
    _wait(
        "handles that can be waited for, declared",
        f"{_HANDLES}.h",
        "a function to wait for a handle",
        "  bool PollHandle(int handle);\n",
        "  bool PollHandle(int handle);\n  void WaitForHandle(int handle);\n",
    ),
    _wait(
        "handles that can be waited for, condition",
        f"{_HANDLES}.h",
        "the condition that finished handles set",
        "  std::mutex mutex_;\n",
        "  std::mutex mutex_;\n  std::condition_variable done_;\n",
    ),
    _wait(
        "handles that can be waited for, include",
        f"{_HANDLES}.h",
        "the header of the condition",
        "#include <atomic>\n",
        "#include <atomic>\n#include <condition_variable>\n",
    ),
    _wait(
        "handles that can be waited for",
        f"{_HANDLES}.cc",
        "a finished handle sets the condition",
        """\
  results_[handle] = std::make_shared<Status>(status);
}
""",
        """\
  results_[handle] = std::make_shared<Status>(status);
  done_.notify_all();
}

void HandleManager::WaitForHandle(int handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] {
    auto result = results_.find(handle);
    return result == results_.end() || result->second != nullptr;
  });
}
""",
    ),
    _wait(
        "handles that are forgotten wake who waits",
        f"{_HANDLES}.cc",
        "a reset sets the condition",
        "  results_.clear();\n",
        "  results_.clear();\n  done_.notify_all();\n",
    ),
    _wait(
        "synchronize waits",
        "horovod/torch/mpi_ops_v2.cc",
        "synchronize sleeps until its handle is finished",
        """\
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
""",
        """\
  if (BlockingWaits()) {
    py::gil_scoped_release release_python_gil;
    handle_manager.WaitForHandle(handle);
  }
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
""",
    ),
    _wait(
        "synchronize waits, include",
        "horovod/torch/mpi_ops_v2.cc",
        "the header that declares BlockingWaits",
        '#include "handle_manager.h"\n',
        '#include "../common/tensor_queue.h"\n#include "handle_manager.h"\n',
    ),
)
