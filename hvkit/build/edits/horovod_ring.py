"""Edits after which Horovod sums large tensors in host memory by rings of its own.

Open MPI's own choice sends three times a tensor's bytes from one of three hosts, where 4/3 from
each would do. It can be told to use a ring, but only for every reduction in the process, which
would give wrong results for a script's own operations that do not commute. Horovod's commute.

``HVKIT_RING_ALLREDUCE=1`` on all ranks turns this on, and ``hvkit.init`` sets it.
"""

from hvkit.build.edits.source_edits import Edit

_FILE = "horovod/common/ops/mpi_operations.cc"
_WHY = "Open MPI sends more bytes than needed, and takes longer"
_UPSTREAM = "leaves the algorithm to MPI"

RING = (
    Edit(
        "ring",
        _FILE,
        "sums by rings",
        _WHY,
        _UPSTREAM,
        """\
namespace horovod {
namespace common {

MPIAllreduce::MPIAllreduce(""",
        """\
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

namespace horovod {
namespace common {

namespace {

const int RING_TAG = 7;
// Bytes of a message, which are added as soon as they have come, while they are in a cache.
const int SEGMENT = 1 << 17;
// Messages that are on their way at a time.
const int AHEAD = 8;
// Bytes of a whole message, and of each rank's block, from which a ring pays.
const int64_t LEAST = 1 << 18;
const int64_t LEAST_BLOCK = 1 << 15;

// Who adds up: MPI, one ring of all ranks, or rings within the hosts and others between them.
enum SumBy : int { BY_MPI = 1, BY_ONE_RING, BY_RINGS_OF_HOSTS };

// The same on every rank of a process set; found out together once, and kept with its communicator.
SumBy HowToSum(const MPIContext& context) {
  static const int key = [] {
    int made;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &made, nullptr);
    return made;
  }();
  const MPI_Comm comm = context.GetMPICommunicator(Communicator::GLOBAL);
  void* kept;
  int found;
  MPI_Comm_get_attr(comm, key, &kept, &found);
  if (found) {
    return SumBy(reinterpret_cast<intptr_t>(kept));
  }
  int local_rank, local_size, hosts;
  MPI_Comm_rank(context.GetMPICommunicator(Communicator::LOCAL), &local_rank);
  MPI_Comm_size(context.GetMPICommunicator(Communicator::LOCAL), &local_size);
  const char* value = std::getenv("HVKIT_RING_ALLREDUCE");
  // Whether all ranks want rings, the fewest ranks on a host, and the most.
  int least[] = {value != nullptr && std::string(value) == "1", local_size, -local_size};
  MPI_Allreduce(MPI_IN_PLACE, least, 3, MPI_INT, MPI_MIN, comm);
  hosts = local_rank == 0;
  MPI_Allreduce(MPI_IN_PLACE, &hosts, 1, MPI_INT, MPI_SUM, comm);
  const bool even = least[1] == -least[2];
  // Between two uneven hosts Open MPI sends the fewest bytes: each host has one rank that sends.
  SumBy by = !least[0] || (!even && hosts == 2) ? BY_MPI : even ? BY_RINGS_OF_HOSTS : BY_ONE_RING;
  MPI_Comm_set_attr(comm, key, reinterpret_cast<void*>(intptr_t(by)));
  return by;
}

// Where a rank's block begins in a buffer.
int BlockBegin(int count, int block, int size) {
  return int(int64_t(count) * block / size);
}

// Each rank owns the block of the rank after it. In size - 1 steps blocks go round, from rank to
// rank: sums, to which each rank adds its own numbers until the owner has it, or owners' results.
// Segments of a block are messages of their own. The next are on their way already while a rank
// waits for one, so that a slow link is never idle.
int GoRound(bool adds, char* buffer, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  int rank, size, width;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  MPI_Type_size(type, &width);
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  // Blocks differ by one element, and so does where they end.
  const int segment = SEGMENT / width, segments = count / size / segment + 1;
  // What a rank sends in one step it has received in the one before.
  const int ahead = std::min(AHEAD, segments), messages = (size - 1) * segments;
  static thread_local char received[AHEAD][SEGMENT];
  MPI_Request requests[AHEAD][2];
  auto place = [&](int block, int offset) {
    return buffer + (size_t(BlockBegin(count, block, size)) + offset) * width;
  };
  auto length = [&](int block, int offset) {
    const int whole = BlockBegin(count, block + 1, size) - BlockBegin(count, block, size);
    return std::max(0, std::min(segment, whole - offset));
  };
  int code = MPI_SUCCESS;
  for (int message = 0; message < messages + ahead && code == MPI_SUCCESS; ++message) {
    const int done = message - ahead;
    if (done >= 0) {
      const int offset = done % segments * segment;
      const int got = (rank + 2 * size - done / segments - (adds ? 1 : 0)) % size;
      code = MPI_Waitall(2, requests[done % ahead], MPI_STATUSES_IGNORE);
      if (code == MPI_SUCCESS && adds) {
        code = MPI_Reduce_local(received[done % ahead], place(got, offset), length(got, offset),
                                type, op);
      }
    }
    if (message < messages && code == MPI_SUCCESS) {
      const int offset = message % segments * segment;
      const int sent = (rank + size - message / segments + (adds ? 0 : 1)) % size;
      const int got = (sent + size - 1) % size;
      void* into = adds ? received[message % ahead] : place(got, offset);
      MPI_Request* pair = requests[message % ahead];
      code = MPI_Irecv(into, length(got, offset), type, previous, RING_TAG, comm, &pair[0]);
      if (code == MPI_SUCCESS) {
        code = MPI_Isend(place(sent, offset), length(sent, offset), type, next, RING_TAG, comm,
                         &pair[1]);
      }
    }
  }
  return code;
}

// As MPI_Allreduce, for operations that commute. A ring sends 2 (N - 1) / N of the bytes from each
// of N ranks (Patarasuk and Yuan, 2009). Where hosts have several ranks, these add up first, and
// each sends its own block to the other hosts.
int AllreduceByRings(const void* sendbuf, void* recvbuf, int count, MPI_Datatype type, MPI_Op op,
                     const MPIContext& context) {
  const MPI_Comm global = context.GetMPICommunicator(Communicator::GLOBAL);
  int size, width;
  MPI_Comm_size(global, &size);
  MPI_Type_size(type, &width);
  const bool large = int64_t(count) * width >= std::max(LEAST, size * LEAST_BLOCK);
  const SumBy by = large ? HowToSum(context) : BY_MPI;
  if (by == BY_MPI) {
    return MPI_Allreduce(sendbuf, recvbuf, count, type, op, global);
  }
  const bool one = by == BY_ONE_RING;
  const MPI_Comm local = one ? MPI_COMM_SELF : context.GetMPICommunicator(Communicator::LOCAL);
  const MPI_Comm cross = one ? global : context.GetMPICommunicator(Communicator::CROSS);
  char* buffer = static_cast<char*>(recvbuf);
  if (sendbuf != MPI_IN_PLACE) {
    std::memcpy(buffer, sendbuf, size_t(count) * width);
  }
  int local_rank, local_size;
  MPI_Comm_rank(local, &local_rank);
  MPI_Comm_size(local, &local_size);
  const int own = (local_rank + 1) % local_size;
  const int begin = BlockBegin(count, own, local_size);
  const int length = BlockBegin(count, own + 1, local_size) - begin;
  char* block = buffer + size_t(begin) * width;
  int code = GoRound(true, buffer, count, type, op, local);
  for (bool adds : {true, false}) {
    code = code == MPI_SUCCESS ? GoRound(adds, block, length, type, op, cross) : code;
  }
  return code == MPI_SUCCESS ? GoRound(false, buffer, count, type, op, local) : code;
}

} // namespace

MPIAllreduce::MPIAllreduce(""",
    ),
    Edit(
        "ring used",
        _FILE,
        "rings for large tensors",
        _WHY,
        _UPSTREAM,
        """\
  int op =
      MPI_Allreduce(sendbuf, buffer_data, (int)num_elements,
                    mpi_context.GetMPIDataType(first_entry.tensor),
                    mpiOp,
                    mpi_context.GetMPICommunicator(Communicator::GLOBAL));
""",
        """\
  int op = AllreduceByRings(sendbuf, buffer_data, (int)num_elements,
                            mpi_context.GetMPIDataType(first_entry.tensor), mpiOp, mpi_context);
""",
    ),
)
