// Package erofs writes and reads Harena's layer images: EROFS, uncompressed,
// split into a metadata image and a data blob.
//
// # Images
//
// The metadata image holds the superblock, inodes, extended attributes, symbolic
// links, directories and chunk indexes; the data blob (device slot 1, always
// present, may be empty) holds nothing but 4 KiB blocks of file content. Mount
// with source=META and device=BLOB. File content is never inlined into the
// metadata image: that image stays small and can be fetched whole while the
// blob is read lazily, and content can be streamed without being held in memory.
//
//   - Files are chunk-based. Equal chunks of one layer are stored once; chunks of
//     zeros are holes. Chunks are 4 KiB while a file streams (larger from 16 GiB
//     on, so that an index has at most 2^22 entries) and become as large as the
//     file's runs in the blob allow when its index is written.
//   - Inodes are the extended kind (64 bytes): 32-bit owners, nanosecond times.
//   - Symbolic links and the last block of a directory are inlined behind their
//     inode where they fit.
//   - Extended attributes are stored inline with each inode: at most 65,535 bytes
//     a value and about 256 KiB an inode.
//
// # Writing against other layers
//
// Options.Parents are blobs with a chunk index (Index): SHA-256 of each block, cut
// to 192 bits, to block number. What a parent has is referred to, not stored. The
// blob of the image itself may then be empty. Merge turns a stack of images, with
// an overlay's upper directory on top, into one whose content stays where it is.
//
// # Determinism
//
// The same tree gives the same bytes: inodes are laid out by sorted names, and
// UUID, build time and implied directories have fixed values. Neither inode
// numbers nor the order of a directory's entries matter. The blob follows the
// order in which content arrives: sorted for a directory, the archive's own
// order for a tar (an archive made in sorted order gives what FromDir gives).
// Against the same parents in the same order, the same tree gives the same bytes.
//
// # Memory
//
// The heap peaks at about 1 KB a name (measured: 460 MB for 525,000 files), plus
// 12 bytes a run of contiguous blocks and at most about 1.2 GB for deduplication
// (some 35 bytes a block, up to 2^25 of them; blocks past that are stored without
// being remembered). An open chunk index takes at most 1 MiB, whatever the size of
// its blob. Content is never held. Merge keeps all names of its stack.
//
// The on-disk format is that of Linux, fs/erofs/erofs_fs.h and
// Documentation/filesystems/erofs.rst.
package erofs
