package files

import (
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// fileInfo describes a file at path, which is absolute.
func fileInfo(path string, st *unix.Stat_t, link string) *harenav1.FileInfo {
	if trimmed := strings.TrimRight(path, "/"); trimmed != "" {
		path = trimmed
	} else {
		path = "/"
	}
	name := path[strings.LastIndexByte(path, '/')+1:]
	if name == "" {
		name = path
	}
	info := &harenav1.FileInfo{
		Type:     typeName(st.Mode),
		Size:     st.Size,
		Mode:     st.Mode & 0o7777,
		Uid:      st.Uid,
		Gid:      st.Gid,
		Modified: &timestamppb.Timestamp{Seconds: st.Mtim.Sec, Nanos: int32(st.Mtim.Nsec)},
	}
	info.Path, info.PathBytes = display(path)
	info.Name, info.NameBytes = display(name)
	info.LinkTarget, info.LinkTargetBytes = display(link)
	return info
}

func typeName(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return "file"
	case unix.S_IFDIR:
		return "directory"
	case unix.S_IFLNK:
		return "symlink"
	case unix.S_IFIFO:
		return "fifo"
	case unix.S_IFSOCK:
		return "socket"
	case unix.S_IFCHR:
		return "char-device"
	case unix.S_IFBLK:
		return "block-device"
	}
	return "unknown"
}
