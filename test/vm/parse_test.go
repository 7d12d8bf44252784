package vm

import (
	"slices"
	"testing"
)

func TestParser(t *testing.T) {
	p := &parser{mark: "@x", results: map[string]*result{}}
	for _, line := range []string{"noise", "@x begin a", "one", "@xtwo", "@x end a 3 17", "noise", "@x begin b", "three", "@x done"} {
		if err := p.line(line); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
	}
	if a := p.results["a"]; !a.ended || a.status != 3 || a.seconds != "17" || a.output != "one\n@xtwo\n" {
		t.Errorf("a: %+v", a)
	}
	if b := p.results["b"]; b.ended || b.output != "three\n" || !p.done {
		t.Errorf("b: %+v, done %v", b, p.done)
	}
	for _, line := range []string{"@x end c 0 1", "@x end b x 1", "@x nonsense"} {
		if err := p.line(line); err == nil {
			t.Errorf("%s was taken", line)
		}
	}
}

func TestModuleFiles(t *testing.T) {
	dep := []byte("kernel/fs/a.ko.xz: kernel/lib/b-c.ko.xz kernel/lib/d.ko.xz\nkernel/lib/b-c.ko.xz: kernel/lib/d.ko.xz\nkernel/lib/d.ko.xz:\n")
	got := moduleFiles(dep, "b_c", "builtin", "a")
	if want := []string{"kernel/lib/d.ko.xz", "kernel/lib/b-c.ko.xz", "kernel/fs/a.ko.xz"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestDependedKernel(t *testing.T) {
	for show, want := range map[string]string{
		"Package: x\nDepends: linux-image-6.12.1+deb12-cloud-amd64 (= 6.12.1-1)\n": "linux-image-6.12.1+deb12-cloud-amd64",
		"Depends: kmod, linux-base (>= 4)\n":                                       "",
		"":                                                                         "",
	} {
		if got := dependedKernel(show); got != want {
			t.Errorf("%q: %q, want %q", show, got, want)
		}
	}
}

func TestSamePackages(t *testing.T) {
	if !samePackages("debootstrap:s:b,a", "debootstrap:s:a,b") || samePackages("debootstrap:s:a", "debootstrap:s:a,b") || samePackages("debootstrap:s:a,b", "debootstrap:s:a,c") {
		t.Error("sets of packages are not compared as sets")
	}
}
