package erofs

import (
	"maps"
	"slices"
	"strings"

	"github.com/harena-dev/harena/internal/errs"
)

// Prefixes of attribute names that the format stores as an index
// (EROFS_XATTR_INDEX_*). Names of the last two have no suffix.
const (
	attrUser       = 1
	attrACLAccess  = 2
	attrACLDefault = 3
	attrTrusted    = 4
	attrSecurity   = 6

	nameACLAccess  = "system.posix_acl_access"
	nameACLDefault = "system.posix_acl_default"
	nameCapability = "security.capability"
	overlayPrefix  = "trusted.overlay."
	nameOpaque     = overlayPrefix + "opaque"
)

func attrIndex(name string) (index byte, suffix string) {
	switch name {
	case nameACLAccess:
		return attrACLAccess, ""
	case nameACLDefault:
		return attrACLDefault, ""
	}
	for index, prefix := range map[byte]string{attrUser: "user.", attrTrusted: "trusted.", attrSecurity: "security."} {
		if s, ok := strings.CutPrefix(name, prefix); ok && s != "" {
			return index, s
		}
	}
	return 0, ""
}

func attrName(index byte, suffix string) string {
	switch index {
	case attrUser:
		return "user." + suffix
	case attrTrusted:
		return "trusted." + suffix
	case attrSecurity:
		return "security." + suffix
	case attrACLAccess:
		return nameACLAccess
	case attrACLDefault:
		return nameACLDefault
	}
	return ""
}

// verdict is what becomes of an attribute.
type verdict int

const (
	attrKeep verdict = iota
	attrDrop         // silently: it means nothing outside the upper layer
	attrWarn         // drop and say so
	attrRefuse
)

// isLabel tells the attributes by which security modules of the kernel (XATTR_*_SUFFIX of linux/xattr.h; Smack
// has several, BPF programs any below bpf.) would let a tree say what its files may do on this machine.
func isLabel(name string) bool {
	suffix := strings.TrimPrefix(name, "security.")
	if suffix == "" {
		return true
	}
	for _, label := range [...]string{"selinux", "SMACK64", "apparmor", "ima", "evm", "bpf."} {
		if strings.HasPrefix(suffix, label) {
			return true
		}
	}
	return false
}

// judge decides which attributes get into a layer. It is the boundary against
// attributes that steer overlayfs (redirect and metacopy injection) and against
// labels of the machine that made the tree.
func judge(name string, keepTrusted bool) verdict {
	switch {
	case name == nameCapability, name == nameACLAccess, name == nameACLDefault:
		return attrKeep
	case strings.HasPrefix(name, "user.") && name != "user.":
		return attrKeep
	case strings.HasPrefix(name, "security.") && !isLabel(name):
		return attrKeep
	case strings.HasPrefix(name, overlayPrefix) && keepTrusted:
		switch strings.TrimPrefix(name, overlayPrefix) {
		case "opaque", "whiteout", "xwhiteouts":
			return attrKeep
		case "metacopy", "redirect":
			return attrRefuse
		}
		// origin, impure, nlink, uuid, upper, protattr, verity: about inodes
		// of the file systems that the overlay was made of.
		return attrDrop
	}
	return attrWarn
}

// encodeAttrs applies the policy and returns what is stored behind the header of
// an inode's attributes. Equal encodings share memory.
func (b *builder) encodeAttrs(path string, attrs map[string]string) (string, error) {
	if len(attrs) == 0 {
		return "", nil
	}
	var out []byte
	for _, name := range slices.Sorted(maps.Keys(attrs)) {
		switch judge(name, b.o.KeepTrusted) {
		case attrKeep:
		case attrDrop:
			continue
		case attrWarn:
			b.warnDropped(path, name)
			continue
		case attrRefuse:
			return "", errs.E(errs.Invalid, "its content is in another layer (extended attribute %q)", name).
				WithHint("mount the overlay with metacopy=off,redirect_dir=nofollow before its upper layer is packed")
		}
		var err error
		if out, err = appendAttr(out, name, attrs[name]); err != nil {
			return "", err
		}
	}
	if err := b.grow(len(out)); err != nil {
		return "", err
	}
	s, ok := b.attrs[string(out)]
	if !ok {
		s = string(out)
		b.attrs[s] = s
	}
	return s, nil
}

func appendAttr(out []byte, name, value string) ([]byte, error) {
	index, suffix := attrIndex(name)
	if len(name) > maxNameLen || strings.IndexByte(name, 0) >= 0 {
		return nil, errs.E(errs.Invalid, "the name of extended attribute %.300q is not valid", name)
	}
	if len(value) > maxXattrValue {
		return nil, errs.OverLimit(errs.Invalid, "value of an extended attribute in a layer, in bytes", maxXattrValue, len(value)).
			WithHint("remove or shorten %q", name)
	}
	out = append(out, byte(len(suffix)), index)
	out = le.AppendUint16(out, uint16(len(value)))
	out = append(out, suffix...)
	out = append(out, value...)
	out = append(out, make([]byte, alignUp(len(out), 4)-len(out))...)
	if size := xattrHeaderSize + len(out); size > maxXattrBodySize {
		return nil, errs.OverLimit(errs.Invalid, "extended attributes of a file in a layer, in bytes", maxXattrBodySize, size)
	}
	return out, nil
}

// nextAttr splits off the first of encoded attributes; ok is false where they
// are malformed.
func nextAttr(enc string) (name, value, rest string, ok bool) {
	if len(enc) < xattrEntrySize {
		return "", "", "", false
	}
	suffixLen, valueLen := int(enc[0]), int(enc[2])|int(enc[3])<<8
	end := xattrEntrySize + suffixLen + valueLen
	if end > len(enc) {
		return "", "", "", false
	}
	name = attrName(enc[1], enc[xattrEntrySize:xattrEntrySize+suffixLen])
	value = enc[xattrEntrySize+suffixLen : end]
	return name, value, enc[min(alignUp(end, 4), len(enc)):], name != ""
}

// makeOpaque returns encoded attributes that mark a directory as opaque.
func makeOpaque(enc string) (string, error) {
	for rest := enc; rest != ""; {
		name, _, next, ok := nextAttr(rest)
		if !ok || name == nameOpaque {
			return enc, nil
		}
		rest = next
	}
	out, err := appendAttr([]byte(enc), nameOpaque, "y")
	return string(out), err
}

// isOpaque tells whether encoded attributes mark a directory as opaque.
func isOpaque(enc string) bool {
	for rest := enc; rest != ""; {
		name, value, next, ok := nextAttr(rest)
		if !ok {
			return false
		}
		if name == nameOpaque && value == "y" {
			return true
		}
		rest = next
	}
	return false
}
