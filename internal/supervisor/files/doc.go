// Package files serves a sandbox's files.
//
// Two halves live here and meet only in frames over two pipes:
//
//   - [Service], in the supervisor, decides: who the user is, what the path
//     means, which limits apply, what an answer may look like. It never touches
//     a path of the sandbox.
//   - [WorkerMain], in a worker process with the sandbox's user and mount
//     namespaces and the target user's credentials, acts. Everything it says is
//     data to the service, checked and bounded, for the files that it reads are
//     hostile.
//
// # Protocol
//
// A frame is a type, a length (4 bytes, big endian) and at most 256 KiB. One
// operation at a time runs on a worker:
//
//	read    Q → I R | F;  then (G → D* E | F)* A → E
//	write   Q → R | F;    then (D* E | A) → I | F
//	tar in  Q → R | F;    then (D* E | A) → I | F
//	tar out Q → R | F;    then D* E | F
//	watch   Q → (P* E | F) or, asked by A, E; a part holds events, each after its length as a varint
//	others  Q → P* I? E | F
//
// Q request, I file info, R ready, G go (a range), D data, P part of a listing, E
// end, A abort, F failure; K, from the worker at any time, says that it lives and
// makes progress. After an F in a transfer to the worker, the worker discards
// what comes up to E or A and is free again.
//
// # Paths
//
// Every look-up is openat2(2) with RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS from
// the descriptor of the sandbox's root, or one name relative to a descriptor
// that came from such a look-up. What lies on a kernel file system (procfs, sysfs,
// cgroupfs, devpts and so on) is refused, and content is read from regular files
// only.
package files
