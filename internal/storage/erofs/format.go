package erofs

import (
	"encoding/binary"
	"hash/crc32"
)

// On-disk constants; names in comments are those of fs/erofs/erofs_fs.h.
const (
	blockBits = 12
	blockSize = 1 << blockBits

	superOffset = 1024       // EROFS_SUPER_OFFSET
	superSize   = 128        // sizeof(struct erofs_super_block)
	superMagic  = 0xE0F5E1E2 // EROFS_SUPER_MAGIC_V1

	compatSuperChecksum = 0x1 // EROFS_FEATURE_COMPAT_SB_CHKSUM
	compatMtime         = 0x2 // EROFS_FEATURE_COMPAT_MTIME

	incompatChunkedFile = 0x4 // EROFS_FEATURE_INCOMPAT_CHUNKED_FILE
	incompatDeviceTable = 0x8 // EROFS_FEATURE_INCOMPAT_DEVICE_TABLE

	deviceSlotSize   = 128 // sizeof(struct erofs_deviceslot)
	deviceSlotOffset = superOffset + superSize
	deviceTag        = "harena-blob"
	blobDevice       = 1 // device_id of the image's own blob; those of other layers follow

	slotSize  = 32 // inodes start at multiples of it; a NID counts them
	inodeSize = 64 // sizeof(struct erofs_inode_extended)

	inodeExtended    = 1 // bit 0 of i_format
	layoutPlain      = 0 // EROFS_INODE_FLAT_PLAIN
	layoutInline     = 2 // EROFS_INODE_FLAT_INLINE
	layoutChunked    = 4 // EROFS_INODE_CHUNK_BASED
	chunkIndexes     = 0x20
	chunkBitsMask    = 0x1f
	chunkIndexSize   = 8
	nullBlock        = 0xffffffff // EROFS_NULL_ADDR: a hole
	maxBlocks        = nullBlock - 1
	direntSize       = 12
	maxNameLen       = 255
	maxPathLen       = 4095 // PATH_MAX less the final NUL
	xattrHeaderSize  = 12   // sizeof(struct erofs_xattr_ibody_header)
	xattrEntrySize   = 4    // sizeof(struct erofs_xattr_entry)
	maxXattrBodySize = xattrHeaderSize + xattrEntrySize*(1<<16-2)
	maxXattrValue    = 1<<16 - 1

	maxTagLen = 64
)

// firstInode follows the device slots in block 0: the root, whose NID must fit 16
// bits. NID 0 is never used: readdir callers skip inode 0.
func firstInode(devices int) int64 { return deviceSlotOffset + int64(devices)*deviceSlotSize }

// Chunks grow with the file so that no index has more than 2^maxIndexBits
// entries while a file streams, and stop at 2^maxChunkBits blocks (4 GiB).
const (
	maxIndexBits = 22
	maxChunkBits = 20
	maxFileSize  = int64(maxBlocks) << blockBits // what 32-bit block numbers can hold
)

var le = binary.LittleEndian

// File types of directory entries (EROFS_FT_*, the values of <linux/fs_types.h>).
const (
	ftRegular = 1 + iota
	ftDirectory
	ftChar
	ftBlock
	ftFifo
	ftSocket
	ftSymlink
)

// Values of st_mode, the same on every architecture.
const (
	modeFmt  = 0o170000
	modeSock = 0o140000
	modeLnk  = 0o120000
	modeReg  = 0o100000
	modeBlk  = 0o060000
	modeDir  = 0o040000
	modeChr  = 0o020000
	modeFifo = 0o010000
	modePerm = 0o007777
)

func fileType(mode uint32) byte {
	switch mode & modeFmt {
	case modeReg:
		return ftRegular
	case modeDir:
		return ftDirectory
	case modeChr:
		return ftChar
	case modeBlk:
		return ftBlock
	case modeFifo:
		return ftFifo
	case modeSock:
		return ftSocket
	case modeLnk:
		return ftSymlink
	}
	return 0
}

// Device numbers are stored as new_encode_dev() of the kernel makes them: 12
// bits of major, 20 bits of minor.
const (
	maxMajor = 1<<12 - 1
	maxMinor = 1<<20 - 1
)

func encodeDevice(major, minor uint32) uint32 {
	return minor&0xff | major<<8 | minor&^0xff<<12
}

func decodeDevice(d uint32) (major, minor uint32) {
	return d >> 8 & 0xfff, d&0xff | d>>12&0xfff00
}

// superblock holds the fields that Harena's images use.
type superblock struct {
	rootNID uint16
	inodes  uint64
	blocks  uint32 // of the metadata image
	devices []Device
}

// Device is a slot of an image's device table.
type Device struct {
	Tag    string // of a blob of another layer its SHA-256, 64 hexadecimal digits
	Blocks uint32 // of 4096 bytes
}

// encode fills block 0, whose other content (the first inodes) is in place, and
// signs it.
func (s superblock) encode(block []byte) {
	b := block[superOffset:]
	le.PutUint32(b, superMagic)
	le.PutUint32(b[8:], compatSuperChecksum|compatMtime)
	b[12] = blockBits
	le.PutUint16(b[14:], s.rootNID)
	le.PutUint64(b[16:], s.inodes)
	le.PutUint32(b[36:], s.blocks)
	le.PutUint32(b[80:], incompatChunkedFile|incompatDeviceTable)
	le.PutUint16(b[86:], uint16(len(s.devices)))
	le.PutUint16(b[88:], deviceSlotOffset/deviceSlotSize)
	for i, d := range s.devices {
		slot := block[deviceSlotOffset+i*deviceSlotSize:]
		copy(slot[:maxTagLen], d.Tag)
		le.PutUint32(slot[64:], d.Blocks)
	}
	le.PutUint32(b[4:], superChecksum(block))
}

// superChecksum is CRC-32C, without the final inversion, of block 0 from the
// superblock on with the checksum field as zero (erofs_superblock_csum_verify).
func superChecksum(block []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli)
	sum := crc32.Update(0, table, block[superOffset:superOffset+4])
	sum = crc32.Update(sum, table, make([]byte, 4))
	return ^crc32.Update(sum, table, block[superOffset+8:blockSize])
}

func alignUp[T int | int64 | uint64](n, to T) T { return (n + to - 1) / to * to }
