package claim

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
)

func TestFramesFollowEachOther(t *testing.T) {
	var b bytes.Buffer
	for _, m := range []*guestv1.LaunchResult{{}, {Error: "no", InitPid: 7}} {
		if err := Write(&b, m); err != nil {
			t.Fatal(err)
		}
	}
	var first, second, third guestv1.LaunchResult
	if err := Read(&b, &first); err != nil || first.Error != "" {
		t.Errorf("first = %v, %v", &first, err)
	}
	if err := Read(&b, &second); err != nil || second.Error != "no" || second.InitPid != 7 {
		t.Errorf("second = %v, %v", &second, err)
	}
	if err := Read(&b, &third); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v, want EOF", err)
	}
}

func TestReadRefuses(t *testing.T) {
	for name, in := range map[string]string{
		"huge":      "\xff\xff\xff\xff",
		"cut head":  "\x00\x00",
		"cut body":  "\x00\x00\x00\x09abc",
		"not proto": "\x00\x00\x00\x03\xff\xff\xff",
	} {
		err := Read(strings.NewReader(in), &guestv1.LaunchResult{})
		if err == nil || errors.Is(err, io.EOF) && name != "cut head" && err == io.EOF {
			t.Errorf("%s: err = %v", name, err)
		}
	}
}

func TestWriteRefusesWhatReadWould(t *testing.T) {
	if err := Write(io.Discard, &guestv1.LaunchResult{Error: strings.Repeat("x", maxFrame+1)}); err == nil {
		t.Error("an over-long frame was written")
	}
}
