//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// The rules of a process mutex in a NATS subject: it is created where there is no record or a blank one,
// updated only by the revision that was read, taken over only after the holder has been silent for R·F, by no
// clock but one's own, and renewed C times before the program then starts. Each renewal comes after a check. A
// replica that is unfit blanks it once and kills its program.
func TestOnNATSRunIsAProcessMutex(t *testing.T) {
	t.Parallel()
	const interval, missed, confirm = time.Second, 3, 2
	s := natsSite(t)
	w := tap(t, s)
	start := func(name string) *replica {
		s.setFit(t, name, true)
		return s.start(t, name, append([]string{
			"--renew", interval.String(), "--missed", strconv.Itoa(missed), "--confirm", strconv.Itoa(confirm),
			"--check", s.checkOf(name), "--on-loss", "kill",
		}, s.service(t, "stubborn")...)...)
	}
	a := start("a")
	s.awaitStart(t, 0)

	w.rule(t, "the record is created where there is none", func(t *testing.T) {
		if first := w.accepted()[0]; first.expected != 0 || first.holder != "a" {
			t.Errorf("the first write is %+v", first)
		}
	})

	w.rule(t, "each renewal comes after a check", func(t *testing.T) {
		writes := w.await(t, 4, func(w write) bool { return w.holder == "a" })
		checks := s.checks(t, "a")
		for i, w := range writes[1:] {
			if !slices.ContainsFunc(checks, func(c check) bool {
				return c.role == "active" && c.at.After(writes[i].stamp) && c.at.Before(w.stamp)
			}) {
				t.Errorf("there is no check between %v and %v: %+v", writes[i].stamp, w.stamp, checks)
			}
		}
	})

	w.rule(t, "it is updated only by the revision that was read", func(t *testing.T) {
		writes := w.accepted()
		for i, w := range writes[1:] {
			if w.expected != writes[i].sequence {
				t.Errorf("revision %d was replaced by %+v", writes[i].sequence, w)
			}
		}
	})

	w.rule(t, "an unfit holder blanks it once, and its program is killed", func(t *testing.T) {
		s.setFit(t, "a", false)
		blank := w.await(t, 1, func(w write) bool { return w.blank })[0]
		if !s.idle() {
			t.Error("the program runs although its record is blank")
		}
		if s.has(t, "ignored") {
			t.Error("the program was asked to end before it was killed")
		}
		time.Sleep(missed * interval)
		if writes := w.accepted(); writes[len(writes)-1] != blank {
			t.Errorf("after %+v come %+v", blank, writes)
		}
	})

	w.rule(t, "the record is created where it is blank", func(t *testing.T) {
		blank := w.await(t, 1, func(w write) bool { return w.blank })[0]
		s.setFit(t, "a", true)
		s.awaitStart(t, 1)
		next := w.await(t, 1, func(w write) bool { return w.sequence > blank.sequence })[0]
		if next.expected != blank.sequence || next.holder != "a" {
			t.Errorf("after %+v comes %+v", blank, next)
		}
	})

	start("b").awaitLog(t, `msg="lease has another holder"`)
	var takeover write
	w.rule(t, "it is taken over only after R·F of silence, whatever the clocks say", func(t *testing.T) {
		a.signal(t, syscall.SIGKILL)
		<-a.exited
		eventually(t, soon, "a's program is gone", s.idle)
		// The record is renewed as a would renew it, with the times of clocks that are wrong.
		var last write
		stamps := regexp.MustCompile(`"(created|updated)_us":\d+`)
		for i := range 2 * missed {
			writes := w.accepted()
			last = writes[len(writes)-1]
			if last.holder != "a" {
				t.Fatalf("it was taken from a holder that renews: %+v", last)
			}
			stamp := []string{`"${1}_us":1`, `"${1}_us":9000000000000000`}[i%2]
			if last = w.publish(t, renewed, stamps.ReplaceAllString(last.data, stamp), last.sequence); last.sequence == 0 {
				t.Fatal("another has written it")
			}
			time.Sleep(interval)
		}
		takeover = w.await(t, 1, func(w write) bool { return w.holder == "b" })[0]
		if silence := takeover.at.Sub(last.at); silence < missed*interval || takeover.expected != last.sequence {
			t.Errorf("b took over after %v of silence: %+v after %+v", silence, takeover, last)
		}
	})

	w.rule(t, "it is renewed C times before the program starts", func(t *testing.T) {
		began := s.awaitStart(t, 2)
		renewals := 0
		for _, w := range w.accepted() {
			if w.sequence > takeover.sequence && w.at.Before(began.at) {
				renewals++
			}
		}
		if began.holder != "b" || renewals < confirm {
			t.Errorf("%s's program started after %d renewals", began.holder, renewals)
		}
	})

	w.rule(t, "a record that another has written ends the term, and is left alone", func(t *testing.T) {
		// A renewal of b's may come in between.
		var mine write
		eventually(t, soon, "another writes the record", func() bool {
			writes := w.accepted()
			last := writes[len(writes)-1]
			mine = w.publish(t, begun, strings.Replace(last.data, `"holder":"b"`, `"holder":"x"`, 1), last.sequence)
			return mine.sequence != 0
		})
		eventually(t, soon, "b's program is killed", s.idle)
		next := w.await(t, 1, func(w write) bool { return w.sequence > mine.sequence })[0]
		if silence := next.at.Sub(mine.at); silence < missed*interval {
			t.Errorf("b wrote %+v after %v", next, silence)
		}
	})
}

// check is a run of --check.
type check struct {
	role string
	at   time.Time
}

// checkOf returns a --check that notes when it runs, and succeeds as long as the replica is fit.
func (s *site) checkOf(name string) string {
	return fmt.Sprintf(`c() { echo "$1 $(date +%%s%%N)" >>'%[1]s/checks-%[2]s'; test -e '%[1]s/fit-%[2]s'; }; c`, s.dir, name)
}

func (s *site) setFit(t *testing.T, name string, fit bool) {
	t.Helper()
	file := filepath.Join(s.dir, "fit-"+name)
	err := os.Remove(file)
	if fit {
		err = os.WriteFile(file, nil, 0o600)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

func (s *site) checks(t *testing.T, name string) (checks []check) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(s.dir, "checks-"+name))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		var c check
		var at int64
		if _, err := fmt.Sscan(line, &c.role, &at); err != nil {
			t.Skipf("this system's date has no nanoseconds: %q", line)
		}
		c.at = time.Unix(0, at)
		checks = append(checks, c)
	}
	return checks
}

// The subjects of the lease's record, in a stream of natstenure.
const (
	record  = "TENURE.o." + defaultType + ".svc."
	begun   = record + "t"
	renewed = record + "r"
)

// wire has what the clients of a NATS server write to the record of the site's lease.
type wire struct {
	nc *nats.Conn

	mu     sync.Mutex
	writes []*wireWrite
}

// write is one that was accepted.
type write struct {
	at       time.Time // when it passed
	stamp    time.Time // by the writer's clock, just before
	subject  string
	sequence uint64
	expected uint64 // the sequence that the record had to be at
	blank    bool
	holder   string
	data     string
}

// wireWrite is a write with the inbox where its answer arrives. Its sequence is 0 until then, and
// if it is refused.
type wireWrite struct {
	write
	reply string
}

// tap listens to what passes through the site's server.
func tap(t *testing.T, s *site) *wire {
	t.Helper()
	url, _, _ := strings.Cut(s.store, "/?")
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	w := &wire{nc: nc}
	if _, err := nc.Subscribe(">", w.note); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *wire) note(m *nats.Msg) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if strings.HasPrefix(m.Subject, record) && !strings.HasPrefix(m.Reply, "$JS.ACK.") {
		line, payload, _ := bytes.Cut(m.Data, []byte("\n"))
		var meta struct {
			Deleted bool
			Updated int64 `json:"updated_us"`
		}
		_ = json.Unmarshal(line, &meta)
		wr := &wireWrite{reply: m.Reply, write: write{at: time.Now(), subject: m.Subject, data: string(m.Data)}}
		wr.blank, wr.stamp = meta.Deleted, time.UnixMicro(meta.Updated)
		_ = json.Unmarshal(payload, &struct{ Holder *string }{&wr.holder})
		wr.expected, _ = strconv.ParseUint(m.Header.Get("Nats-Expected-Last-Subject-Sequence"), 10, 64)
		if m.Header.Get("Nats-Expected-Last-Subject-Sequence-Subject") != record+"*" {
			wr.expected = ^uint64(0) // it would have replaced what it has not read
		}
		w.writes = append(w.writes, wr)
		return
	}
	for _, wr := range w.writes {
		if wr.reply == m.Subject && wr.reply != "" {
			var answer struct{ Seq uint64 }
			_ = json.Unmarshal(m.Data, &answer)
			wr.sequence = answer.Seq
		}
	}
}

// accepted returns the writes that the server has accepted so far.
func (w *wire) accepted() (writes []write) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, wr := range w.writes {
		if wr.sequence != 0 {
			writes = append(writes, wr.write)
		}
	}
	slices.SortFunc(writes, func(a, b write) int { return int(a.sequence) - int(b.sequence) })
	return writes
}

// await returns the first n writes that match, when there are as many.
func (w *wire) await(t *testing.T, n int, match func(write) bool) (found []write) {
	t.Helper()
	eventually(t, soon, "there are writes to the record", func() bool {
		found = slices.DeleteFunc(w.accepted(), func(w write) bool { return !match(w) })
		return len(found) >= n
	})
	return found[:n]
}

// publish writes the record as a client does; the sequence of the result is 0 if it was refused.
func (w *wire) publish(t *testing.T, subject string, data string, expected uint64) write {
	t.Helper()
	m := nats.NewMsg(subject)
	m.Data = []byte(data)
	m.Header.Set("Nats-Expected-Last-Subject-Sequence", strconv.FormatUint(expected, 10))
	m.Header.Set("Nats-Expected-Last-Subject-Sequence-Subject", record+"*")
	answer, err := w.nc.RequestMsg(m, soon)
	if err != nil {
		t.Fatal(err)
	}
	var ack struct{ Seq uint64 }
	if err := json.Unmarshal(answer.Data, &ack); err != nil || ack.Seq == 0 {
		return write{}
	}
	return w.await(t, 1, func(w write) bool { return w.sequence == ack.Seq })[0]
}

// rule runs a step of the test, which ends if it fails.
func (w *wire) rule(t *testing.T, name string, test func(t *testing.T)) {
	t.Helper()
	if !t.Run(name, test) {
		for _, write := range w.accepted() {
			t.Logf("%+v", write)
		}
		t.FailNow()
	}
}
