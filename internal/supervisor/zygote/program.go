package zygote

import (
	"encoding/binary"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// The layout of programs and messages; zygote.c has the same.
const (
	base       = 0x100000000000
	headerSize = 32
	stepSize   = 56
	maxFiles   = 16
	maxSlots   = 64
	noSlot     = 0xff

	opReceive = 0xf000
	opExec    = 0xf001
	opReap    = 0xf002
	opServe   = 0xf003

	// Any stands for every errno in Call.Unless.
	Any = syscall.Errno(0xffff)
)

// Slot holds a descriptor that was sent with a program, or a step's result.
type Slot uint8

// Program is a list of system calls that a zygote, or a child that it forks,
// carries out in order. The first that fails ends it. A Program is pure data: it can be
// built, read and tested without a kernel.
type Program struct {
	// Clone are the flags with which a child is forked for the program; 0 runs it in the zygote itself.
	Clone uint64
	cgrp  int64

	files []*os.File
	data  []byte // what follows the header
	steps []Step
	slots int
}

// Step is one call of a program.
type Step struct {
	Name string // for messages
	nr   uint16
	args [6]uint64
	// slotArgs has bit i set when args[i] is a slot.
	slotArgs uint8
	store    uint8
	ignore   syscall.Errno
	skip     uint8
}

// NewProgram returns an empty program.
func NewProgram() *Program {
	return &Program{cgrp: -1, slots: maxFiles}
}

// File sends a descriptor along. The program's owner keeps its own open until the program was sent.
func (p *Program) File(f *os.File) Slot {
	p.files = append(p.files, f)
	return Slot(len(p.files)) // 0 is the program itself
}

// IntoCgroup makes the child start in the cgroup2 directory in s.
func (p *Program) IntoCgroup(s Slot) { p.cgrp = int64(s) }

// NewSlot returns a slot for results.
func (p *Program) NewSlot() Slot {
	p.slots++
	return Slot(p.slots - 1)
}

// Call appends a system call. Arguments are integers, Slots, strings and byte
// slices; of the latter two, the address of a copy is passed, of strings with a NUL.
func (p *Program) Call(name string, nr uintptr, args ...any) Call {
	s := Step{Name: name, nr: uint16(nr), store: noSlot}
	for i, a := range args {
		switch v := a.(type) {
		case Slot:
			s.args[i], s.slotArgs = uint64(v), s.slotArgs|1<<i
		case string:
			s.args[i] = p.String(v)
		case []byte:
			s.args[i] = p.Bytes(v)
		case int:
			s.args[i] = uint64(v)
		case uint32:
			s.args[i] = uint64(v)
		case uint64:
			s.args[i] = v
		default:
			panic(fmt.Sprintf("zygote: step %s: argument %d has type %T", name, i, a))
		}
	}
	p.steps = append(p.steps, s)
	return Call{p, len(p.steps) - 1}
}

// Call is a step just appended.
type Call struct {
	p *Program
	i int
}

// Into stores the result in s.
func (c Call) Into(s Slot) Call {
	c.p.steps[c.i].store = uint8(s)
	return c
}

// Unless makes errno no failure: the steps that then (may be nil) appends are left out instead.
func (c Call) Unless(errno syscall.Errno, then func()) {
	before := len(c.p.steps)
	if then != nil {
		then()
	}
	c.p.steps[c.i].ignore, c.p.steps[c.i].skip = errno, uint8(len(c.p.steps)-before)
}

// Bytes adds data, aligned to 8 bytes, and returns its address.
func (p *Program) Bytes(b []byte) uint64 {
	p.data = append(p.data, make([]byte, -len(p.data)&7)...)
	addr := uint64(base + headerSize + len(p.data))
	p.data = append(p.data, b...)
	return addr
}

// String adds a NUL-terminated string and returns its address.
func (p *Program) String(s string) uint64 {
	addr := uint64(base + headerSize + len(p.data))
	p.data = append(append(p.data, s...), 0)
	return addr
}

// Strings adds a NULL-terminated array of pointers to strings, as execve(2) takes it.
func (p *Program) Strings(list []string) uint64 {
	ptrs := make([]byte, 0, 8*(len(list)+1))
	for _, s := range list {
		ptrs = binary.NativeEndian.AppendUint64(ptrs, p.String(s))
	}
	return p.Bytes(binary.NativeEndian.AppendUint64(ptrs, 0))
}

// Exec executes the first of paths that can be.
func (p *Program) Exec(paths, argv, env []string) {
	p.Call("exec", opExec, p.Strings(paths), p.Strings(argv), p.Strings(env))
}

// names are the steps' names, by index.
func (p *Program) names() []string {
	names := make([]string, len(p.steps))
	for i, s := range p.steps {
		names[i] = s.Name
	}
	return names
}

// encode lays the program out as the zygote maps it.
func (p *Program) encode() ([]byte, error) {
	if len(p.files) >= maxFiles || p.slots > maxSlots || len(p.steps) > 1<<16 {
		return nil, fmt.Errorf("program has %d files, %d slots, %d steps: too many", len(p.files), p.slots, len(p.steps))
	}
	e := binary.NativeEndian
	steps := p.Bytes(nil)
	out := make([]byte, 0, headerSize+len(p.data)+stepSize*len(p.steps))
	out = e.AppendUint64(out, p.Clone)
	out = e.AppendUint64(out, uint64(p.cgrp))
	out = e.AppendUint64(out, uint64(len(p.steps)))
	out = e.AppendUint64(out, steps)
	out = append(out, p.data...)
	for _, s := range p.steps {
		out = e.AppendUint16(out, s.nr)
		out = e.AppendUint16(out, uint16(s.ignore))
		out = append(out, s.skip, s.store, s.slotArgs, 0)
		for _, a := range s.args {
			out = e.AppendUint64(out, a)
		}
	}
	return out, nil
}

// memfd is a sealed memfd with content.
func memfd(name string, content []byte, flags int) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), name)
	for len(content) > 0 && err == nil {
		var n int
		n, err = unix.Write(fd, content)
		content = content[max(n, 0):]
	}
	if err == nil && flags&unix.MFD_EXEC != 0 {
		// A memfd is 0777 otherwise, and what can be read inside can be traced and stolen (#!/proc/self/exe).
		err = unix.Fchmod(fd, 0o500)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("fill memfd: %w", err)
	}
	return f, nil
}
