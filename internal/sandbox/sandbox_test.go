package sandbox

import (
	"bytes"
	"crypto/rand"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
)

func TestIDs(t *testing.T) {
	edge, err := NewEdgeID(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[ID]bool{}
	for range 1000 {
		id, err := NewID(edge, rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if parsed, err := ParseID(string(id)); err != nil || parsed.Edge() != edge || seen[id] {
			t.Fatalf("id %q: edge %q, repeated %v, %v", id, parsed.Edge(), seen[id], err)
		}
		seen[id] = true
	}
	if _, err := NewID(edge, bytes.NewReader(nil)); err == nil {
		t.Error("an ID was made without randomness")
	}
	for _, bad := range []string{"", "short", strings.Repeat("a", 21), "../../../../etc/pass", "ABCDEFGHIJKLMNOPQRST", strings.Repeat("a", 19) + "\n"} {
		if _, err := ParseID(bad); !errs.Is(err, errs.Invalid) {
			t.Errorf("ParseID(%q) = %v", bad, err)
		}
	}
}

func TestStates(t *testing.T) {
	all := []State{Creating, Running, Pausing, Paused, Resuming, Stopping, Stopped, Failed, Unknown, Lost}
	for _, from := range all {
		for _, to := range all {
			got, err := from.Next(to)
			if err == nil && got != to || err != nil && (got != from || !errs.Is(err, errs.Precondition)) {
				t.Errorf("%s→%s: %s, %v", from, to, got, err)
			}
		}
		if _, err := from.Next(Failed); err != nil && from.Live() {
			t.Errorf("%s cannot fail", from)
		}
		if _, err := from.Next(Stopping); err != nil && from.Live() && from != Stopping {
			t.Errorf("%s cannot be stopped", from)
		}
	}
	if _, err := Stopped.Next(Running); err == nil {
		t.Error("a stopped sandbox ran again")
	}
}

func TestNormalizeFillsDefaults(t *testing.T) {
	in := &harenav1.SandboxSpec{Image: "debian:12"}
	s, err := Normalize(in)
	if err != nil {
		t.Fatal(err)
	}
	if s.Backend != BackendContainer || s.Limits.Memory != DefaultMemory || s.Limits.Cpu != DefaultCPU ||
		s.Limits.Pids != DefaultPids || s.Limits.Disk != DefaultDisk || s.Lifetime.Idle.AsDuration() != DefaultIdle || s.Lifetime.OnIdle != "stop" {
		t.Errorf("defaults: %v", s)
	}
	if in.Limits != nil {
		t.Error("Normalize changed its argument")
	}
	if again, err := Normalize(s); err != nil || again.String() != s.String() {
		t.Errorf("not idempotent: %v, %v", again, err)
	}
	never, err := Normalize(&harenav1.SandboxSpec{Image: "x", Lifetime: &harenav1.Lifetime{Idle: durationpb.New(0)}})
	if err != nil || never.Lifetime.Idle.AsDuration() != 0 {
		t.Errorf("idle 0 means never: %v, %v", never, err)
	}
}

func TestNormalizeRefuses(t *testing.T) {
	many := map[string]string{}
	for i := range MaxLabels + 1 {
		many[strings.Repeat("k", i+1)] = "v"
	}
	for name, s := range map[string]*harenav1.SandboxSpec{
		"no image":        {},
		"backend":         {Image: "x", Backend: "docker"},
		"runtime":         {Image: "x", Runtime: "kata"},
		"qos":             {Image: "x", Qos: "gold"},
		"on idle":         {Image: "x", Lifetime: &harenav1.Lifetime{OnIdle: "burn"}},
		"small memory":    {Image: "x", Limits: &harenav1.Limits{Memory: 1}},
		"negative memory": {Image: "x", Limits: &harenav1.Limits{Memory: -1}},
		"nan cpu":         {Image: "x", Limits: &harenav1.Limits{Cpu: math.NaN()}},
		"infinite cpu":    {Image: "x", Limits: &harenav1.Limits{Cpu: math.Inf(1)}},
		"much cpu":        {Image: "x", Limits: &harenav1.Limits{Cpu: 1e9}},
		"many pids":       {Image: "x", Limits: &harenav1.Limits{Pids: MaxPids + 1}},
		"relative cwd":    {Image: "x", Process: &harenav1.ProcessDefaults{Cwd: "a/b"}},
		"long cwd":        {Image: "x", Process: &harenav1.ProcessDefaults{Cwd: "/" + strings.Repeat("a", MaxPath)}},
		"nul in user":     {Image: "x", Process: &harenav1.ProcessDefaults{User: "a\x00"}},
		"few pids":        {Image: "x", Limits: &harenav1.Limits{Pids: 1}},
		"zero ttl":        {Image: "x", Lifetime: &harenav1.Lifetime{Ttl: durationpb.New(0)}},
		"negative idle":   {Image: "x", Lifetime: &harenav1.Lifetime{Idle: durationpb.New(-time.Second)}},
		"bad duration":    {Image: "x", Lifetime: &harenav1.Lifetime{Lease: &durationpb.Duration{Seconds: 1, Nanos: -1}}},
		"env name":        {Image: "x", Process: &harenav1.ProcessDefaults{Env: map[string]string{"A=B": "c"}}},
		"env nul":         {Image: "x", Process: &harenav1.ProcessDefaults{Env: map[string]string{"A": "c\x00"}}},
		"env size":        {Image: "x", Process: &harenav1.ProcessDefaults{Env: map[string]string{"A": strings.Repeat("x", MaxEnv)}}},
		"label key":       {Image: "x", Labels: map[string]string{"a b": "c"}},
		"label value":     {Image: "x", Labels: map[string]string{"a": "c\n"}},
		"labels":          {Image: "x", Labels: many},
		"job":             {Image: "x", Job: "a b"},
		"long job":        {Image: "x", Job: strings.Repeat("j", 64)},
		"hostname":        {Image: "x", Hostname: "-x"},
		"hostname's end":  {Image: "x", Hostname: "x-"},
		"hostname's dot":  {Image: "x", Hostname: "a.b"},
		"long hostname":   {Image: "x", Hostname: strings.Repeat("h", 64)},
		"no label key":    {Image: "x", Labels: map[string]string{"": "c"}},
		"no env name":     {Image: "x", Process: &harenav1.ProcessDefaults{Env: map[string]string{"": "c"}}},
		"nul in env name": {Image: "x", Process: &harenav1.ProcessDefaults{Env: map[string]string{"A\x00": "c"}}},
		"toolkits":        {Image: "x", Toolkits: make([]string, MaxLayers)},
	} {
		if _, err := Normalize(s); !errs.Is(err, errs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNormalizeAccepts(t *testing.T) {
	for _, s := range []*harenav1.SandboxSpec{
		{Image: "x", Job: "Team_1/run-7.b", Hostname: "a"},
		{Image: "x", Job: strings.Repeat("j", 63), Hostname: "A-" + strings.Repeat("h", 60) + "9"},
		{Image: "x", Limits: &harenav1.Limits{Cpu: MaxCPU, Pids: MaxPids}},
		{Image: "x", Labels: map[string]string{"k": "", "a/b.c_d-9": "Z"}},
		{Image: "x", Process: &harenav1.ProcessDefaults{Env: map[string]string{"a b\n": "", "\xff": "="}}},
	} {
		if _, err := Normalize(s); err != nil {
			t.Errorf("%v: %v", s, err)
		}
	}
}
