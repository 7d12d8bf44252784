package layer

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"strconv"
	"strings"
)

// mountInfo is a line of /proc/self/mountinfo (proc_pid_mountinfo(5)).
type mountInfo struct {
	id      int
	point   string
	options string // of the mount
	shared  bool   // propagates
	fstype  string
	source  string
	super   string // options of the file system
}

func readMountInfo() ([]mountInfo, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return parseMountInfo(bytes.NewReader(b))
}

func parseMountInfo(r io.Reader) ([]mountInfo, error) {
	var out []mountInfo
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		sep := -1
		for i := 6; i < len(fields); i++ {
			if fields[i] == "-" {
				sep = i
				break
			}
		}
		if sep < 0 || len(fields) < sep+4 {
			continue
		}
		id, err := strconv.Atoi(fields[0])
		if err != nil {
			continue
		}
		m := mountInfo{
			id: id, point: unescapeMount(fields[4]), options: fields[5],
			fstype: fields[sep+1], source: unescapeMount(fields[sep+2]), super: fields[sep+3],
		}
		for _, o := range fields[6:sep] {
			m.shared = m.shared || strings.HasPrefix(o, "shared:")
		}
		out = append(out, m)
	}
	return out, sc.Err()
}

// unescapeMount undoes the octal escapes of space, tab, newline, backslash and hash.
func unescapeMount(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
