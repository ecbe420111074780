//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

func TestNothingOfAProgramOutlivesItsTermIfTenureIsKilledOrStopped(t *testing.T) {
	t.Parallel()
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if runtime.GOOS != "linux" {
				t.Skip("on this system a child that leaves the process group is not found")
			}
			s := sqliteSite(t)
			// With this TTL there is a second from SIGKILL to the expiry: on a busy machine
			// processes take long to die.
			r := s.start(t, "a", append([]string{"--ttl", "15s", "--renew", "1s"}, s.service(t, "stubborn", "child")...)...)
			s.awaitStart(t, 0)
			store := s.open(t)
			awaitRenewal(t, store)
			r.signal(t, sig)
			eventually(t, soon, "nothing of it is left", s.idle)
			idle := time.Now()
			h, held := holding(t, store)
			if !held || !idle.Before(h.RenewedAt.Add(h.TTL)) {
				t.Errorf("it outlived its term by %v (the lease is held: %v)", idle.Sub(h.RenewedAt.Add(h.TTL)), held)
			}
			if !s.has(t, "ignored") {
				t.Error("it was not told to end before it was killed")
			}
			if sig == syscall.SIGSTOP { // tenure can continue and start the program again
				r.signal(t, syscall.SIGCONT)
				s.awaitStart(t, 1)
			}
		})
	}
}

func TestAProgramEndsWithItsGuard(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	r := s.start(t, "a", s.service(t, "stubborn", "member")...)
	s.awaitStart(t, 0)
	if err := syscall.Kill(r.pid(t, "guard"), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.awaitStart(t, 1)
	r.awaitLog(t, "the guard has ended before the program")
}

func TestAProgramDiesIfTenureAndItsGuardAreKilled(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("on this system processes don't die with their parent")
	}
	s := sqliteSite(t)
	r := s.start(t, "a", s.service(t, "stubborn")...)
	s.awaitStart(t, 0)
	guard := r.pid(t, "guard")
	for _, step := range []struct {
		pid int
		sig syscall.Signal
	}{{guard, syscall.SIGSTOP}, {r.cmd.Process.Pid, syscall.SIGKILL}, {guard, syscall.SIGKILL}} {
		if err := syscall.Kill(step.pid, step.sig); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, soon, "nothing of it is left", s.idle)
}

func TestAStoppedGuardDoesNotKeepAProgramAlive(t *testing.T) {
	t.Parallel()
	how := map[string][]string{"alone": nil, "with a child in its group": {"member"}}
	if runtime.GOOS == "linux" {
		how["with a child that has left its group"] = []string{"child"}
	}
	for name, how := range how {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sqliteSite(t)
			r := s.start(t, "a", s.service(t, how...)...)
			s.awaitStart(t, 0)
			if err := syscall.Kill(r.pid(t, "guard"), syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			r.signal(t, syscall.SIGTERM)
			r.awaitExit(t)
			if !s.idle() {
				t.Error("something of the program is still running")
			}
		})
	}
}

func TestOrdersThatAGuardDoesNotReadDoNotBlock(t *testing.T) {
	t.Parallel()
	unread, orders, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer unread.Close()
	g := &guarded{orders: orders}
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		size := 0
		for size < 66<<10 { // more than a pipe holds
			g.send(order{Signal: syscall.SIGWINCH})
			size += len(`{"Signal":28}`) + 1
		}
	}()
	select {
	case <-sent:
	case <-time.After(2 * soon):
		t.Error("send waits for the guard")
	}
	some := make([]byte, 14*1000) // the guard reads again
	if _, err := io.ReadFull(unread, some); err != nil {
		t.Fatal(err)
	}
	g.send(order{Kill: true})
	orders.Close()
	all, err := io.ReadAll(unread)
	rest, received := strings.CutSuffix(string(all), `{"Kill":true}`+"\n")
	if !received {
		t.Error("an order did not arrive although there was room for it again")
	}
	if lines := strings.Count(rest, `{"Signal":28}`+"\n"); err != nil || len(rest) != lines*14 {
		t.Errorf("an order was cut off: %d lines in %d bytes, %v", lines, len(rest), err)
	}
}

func TestAGroupOfZombiesIsGone(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("on this system there is no way to know")
	}
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	group := cmd.Process.Pid
	if (knownGroup{id: group}).onlyZombies() {
		t.Error("a running group counts as zombies")
	}
	cmd.Process.Kill()
	eventually(t, soon, "the group is a zombie", func() bool { return (knownGroup{id: group}).onlyZombies() })
	if err := syscall.Kill(-group, 0); err != nil {
		t.Errorf("the kernel no longer knows the group: %v; the test would prove nothing", err)
	}
	cmd.Wait()
	if (knownGroup{id: group}).onlyZombies() {
		t.Error("a group that doesn't exist counts as zombies")
	}
}

func TestAProgramWhoseLeaseRecordIsDeletedIsKilledAtOnce(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	r := s.start(t, "a", s.service(t, "stubborn")...)
	s.awaitStart(t, 0)
	store := s.open(t)
	eventually(t, soon, "the record is deleted", func() bool {
		h, held := holding(t, store)
		return held && store.DeleteIf(t.Context(), h.Key, tenure.IfVersion(h.Version)) == nil
	})
	s.awaitStart(t, 1)
	for _, e := range s.events(t) {
		if e.what == "ignored" {
			t.Error("it was told to end and given time, although another may have started")
		}
	}
	// On a busy machine the guard may not report it in time, and tenure kills it.
	eventually(t, soon, "the program was killed", func() bool {
		return strings.Contains(r.log(), `how="signal: killed" told=true`) || strings.Contains(r.log(), "guard does not answer; killing it")
	})
}

func TestOnLossKillGivesNoTime(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	r := s.start(t, "a", append([]string{"--on-loss", "kill"}, s.service(t)...)...)
	s.awaitStart(t, 0)
	r.signal(t, syscall.SIGKILL)
	eventually(t, soon, "nothing of it is left", s.idle)
	if s.has(t, "stop") {
		t.Error("it was told to end, and given time to")
	}
}

func TestAReplicaWhoseCheckFailsIsReplaced(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *site) {
		asked := filepath.Join(s.dir, "asked")
		check := func(name string) string {
			return fmt.Sprintf("echo %s $1 >>%s; test ! -e %s || { echo unfit >&2; exit 1; }; true", name, asked, filepath.Join(s.dir, "unfit-"+name))
		}
		for _, name := range []string{"a", "b"} {
			script := filepath.Join(s.dir, "check-"+name)
			if err := os.WriteFile(script, []byte(check(name)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		start := func(name string) *replica {
			return s.start(t, name, append([]string{"--check", "sh " + filepath.Join(s.dir, "check-"+name)}, s.service(t)...)...)
		}
		a := start("a")
		s.awaitStart(t, 0)
		b := start("b")
		b.awaitLog(t, `msg="lease has another holder"`)
		if err := os.WriteFile(filepath.Join(s.dir, "unfit-b"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		b.awaitLog(t, "this host could not take over: --check fails")
		if err := os.Remove(filepath.Join(s.dir, "unfit-b")); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(s.dir, "unfit-a"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if next := s.awaitStart(t, 1); next.holder != "b" {
			t.Errorf("%s started it", next.holder)
		}
		if events := s.events(t); !slices.ContainsFunc(events, func(e event) bool { return e.what == "stop" && e.holder == "a" }) {
			t.Error("the program of a was not told to end")
		}
		for _, what := range []string{"a standby", "a active", "b standby"} {
			if !s.told(asked, what) {
				t.Errorf("the check was not run for %q", what)
			}
		}
		if s.told(asked, "b active") && len(s.starts(t)) < 2 {
			t.Error("the check of b was run as if b were the holder")
		}
		a.awaitLog(t, "exit status 1: unfit")
	})
}

func TestACheckThatDoesNotReturnCountsAsFailed(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	hang := filepath.Join(s.dir, "hang")
	script := filepath.Join(s.dir, "check")
	if err := os.WriteFile(script, []byte("test ! -e "+hang+" || sleep 0.4"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.start(t, "a", append([]string{"--check", "sh " + script, "--check-timeout", "200ms"}, s.service(t)...)...)
	s.awaitStart(t, 0)
	if err := os.WriteFile(hang, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "the program is ended", s.idle)
	starts := len(s.starts(t))
	if err := os.Remove(hang); err != nil {
		t.Fatal(err)
	}
	s.awaitStart(t, starts)
}

func TestAPredecessorIsFencedBeforeTheProgramStartsAgain(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *site) {
		fence := fmt.Sprintf(`echo "fence $TENURE_PREDECESSOR $TENURE_TOKEN $(date +%%s)000000000" >>%s`, filepath.Join(s.dir, "log"))
		// The first try fails.
		tried := filepath.Join(s.dir, "tried")
		fence = fmt.Sprintf("if ! test -e %s; then touch %[1]s; echo out of order >&2; exit 1; fi; ", tried) + fence
		args := append([]string{"--confirm", "2", "--fence", fence}, s.service(t)...)
		replicas := map[string]*replica{"a": s.start(t, "a", args...)}
		s.awaitStart(t, 0)
		replicas["b"] = s.start(t, "b", args...)

		// A handover leaves nobody to fence.
		replicas["a"].signal(t, syscall.SIGTERM)
		if s.awaitStart(t, 1); len(s.events(t)) != 3 {
			t.Errorf("after a handover there are %+v", s.events(t))
		}

		replicas["c"] = s.start(t, "c", args...)
		store := s.open(t)
		awaitRenewal(t, store)
		replicas["b"].signal(t, syscall.SIGKILL)
		next := s.awaitStart(t, 2)
		events := s.events(t)
		before := events[len(events)-2]
		if next.holder != "c" || before.what != "fence" || before.holder != "b" || before.token != next.token {
			t.Errorf("before the start by %s came %+v", next.holder, before)
		}
		h, _ := holding(t, store)
		if confirmed := next.at.Sub(h.AcquiredAt); confirmed < 2*testTTL/3-100*time.Millisecond {
			t.Errorf("it started %v after the takeover, before two renewals", confirmed)
		}
		replicas["c"].awaitLog(t, "failed to fence predecessor; retrying")
		replicas["c"].awaitLog(t, "out of order")
	})
}

func TestPeersAreFencedAfterThePredecessor(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	// That of d fails at first.
	tried := filepath.Join(s.dir, "tried")
	fence := fmt.Sprintf(`test $TENURE_PREDECESSOR != d || test -e %s || { touch %[1]s; exit 1; }; `, tried) +
		fmt.Sprintf(`echo "fence${TENURE_PREDECESSOR_TERM:+-holder} $TENURE_PREDECESSOR $TENURE_TOKEN $(date +%%s)000000000" >>%s`, filepath.Join(s.dir, "log"))
	args := append([]string{"--fence", fence, "--peers", "a,b, c,d"}, s.service(t)...)
	a := s.start(t, "a", args...)
	s.awaitStart(t, 0)
	b := s.start(t, "b", args...)
	b.awaitLog(t, `msg="lease has another holder"`)

	a.signal(t, syscall.SIGTERM)
	s.awaitStart(t, 1)
	c := s.start(t, "c", args...)
	c.awaitLog(t, `msg="lease has another holder"`)
	awaitRenewal(t, s.open(t))
	if err := os.Remove(tried); err != nil {
		t.Fatal(err)
	}
	b.signal(t, syscall.SIGKILL)
	s.awaitStart(t, 2)
	c.awaitLog(t, "peer d: exit status 1")
	s.start(t, "a", args...).awaitLog(t, `msg="lease has another holder"`)
	s.ask(t, "handover", "--to", "a")
	s.awaitStart(t, 3)
	for i, want := range []string{
		"a: fence b, fence c, fence d, start a",
		"b: fence a, fence c, fence d, start b",
		"c: fence-holder b, fence a, fence d, start c",
		"a: fence b, fence c, fence d, start a",
	} {
		start := s.starts(t)[i]
		var came []string
		for _, e := range s.events(t) {
			if e.token == start.token && e.what != "stop" {
				came = append(came, e.what+" "+e.holder)
			}
		}
		if got := start.holder + ": " + strings.Join(came, ", "); got != want {
			t.Errorf("in the term %d there was %s, want %s", i+1, got, want)
		}
	}
}

func TestPeersAreFencedOnceInATerm(t *testing.T) {
	t.Parallel()
	store, log := sqliteSite(t).open(t), filepath.Join(t.TempDir(), "fenced")
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: defaultType, ID: "svc"}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	r := &runner{log: slog.New(slog.DiscardHandler), opts: &runOptions{
		ttl: time.Minute, replica: "a", peers: "a,b,c,d", fence: fmt.Sprintf("echo $TENURE_PREDECESSOR >>%s", log),
	}}
	for _, test := range []struct {
		predecessors []string
		want         string
	}{
		{[]string{"a"}, "b c d"}, // it was restarted itself
		{[]string{"b", "a", "e"}, "b e c d"},
		{[]string{"a", "b"}, "b c d"},
		{[]string{"unknown"}, "b c d"}, // after a failover that has lost the holder's record
		{[]string{"alone", "unknown"}, "unknown"},
	} {
		os.Remove(log)
		if r.opts.peers = "a,b,c,d"; test.predecessors[0] == "alone" {
			r.opts.peers, test.predecessors = "a", test.predecessors[1:]
		}
		err := tenure.Do(t.Context(), lease, func(ctx context.Context) error {
			for _, name := range test.predecessors {
				if err := r.fence(ctx, tenure.Holding{Holder: name}); err != nil {
					return err
				}
			}
			return r.fencePeers(ctx)
		})
		fenced, _ := os.ReadFile(log)
		if got := strings.Join(strings.Fields(string(fenced)), " "); err != nil || got != test.want {
			t.Errorf("after %q these were fenced: %q, %v, want %q", test.predecessors, got, err, test.want)
		}
	}
}

func TestAReplicaIsUnfencedBeforeItFencesAndItsProgramStarts(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	tell := func(what, who string) string {
		return fmt.Sprintf(`echo "%s $%s $TENURE_TOKEN $(date +%%s)000000000" >>%s`, what, who, filepath.Join(s.dir, "log"))
	}
	unfit := filepath.Join(s.dir, "unfit")
	start := func(name string) *replica {
		unfence := fmt.Sprintf("test ! -e %s-%s && ", unfit, name) + tell("unfence", "TENURE_HOLDER")
		return s.start(t, name, append([]string{"--fence", tell("fence", "TENURE_PREDECESSOR"), "--unfence", unfence}, s.service(t)...)...)
	}
	events := func() (told []string) {
		for _, e := range s.events(t) {
			told = append(told, e.what+" "+e.holder)
		}
		return told
	}
	a := start("a")
	s.awaitStart(t, 0)
	b := start("b")
	b.awaitLog(t, `msg="lease has another holder"`)
	awaitRenewal(t, s.open(t))
	a.signal(t, syscall.SIGKILL)
	s.awaitStart(t, 1)
	want := []string{"unfence a", "start a", "stop a", "unfence b", "fence a", "start b"}
	if got := events(); !slices.Equal(got, want) {
		t.Errorf("there was %q, want %q", got, want)
	}

	// One that cannot be unfenced gives the lease up.
	if err := os.WriteFile(unfit+"-c", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := start("c")
	c.awaitLog(t, `msg="lease has another holder"`)
	s.ask(t, "handover", "--to", "c")
	if next := s.awaitStart(t, 2); next.holder != "b" {
		t.Errorf("%s started it", next.holder)
	}
	c.awaitLog(t, "--unfence: exit status 1")

	// So does one that has to fence another. The fencing is left to the next holder.
	seen := len(events())
	b.signal(t, syscall.SIGKILL)
	c.awaitLog(t, `cause="lease resigned"`) // at once, and not when it has failed for a TTL
	if err := os.Remove(unfit + "-c"); err != nil {
		t.Fatal(err)
	}
	s.awaitStart(t, 3)
	want = []string{"stop b", "unfence c", "fence b", "start c"}
	if got := events()[seen:]; !slices.Equal(got, want) {
		t.Errorf("there was %q, want %q", got, want)
	}
}

func TestPeersAreFencedAndThisReplicaUnfencedAgainWhileItsProgramRuns(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	// Each command fails while there is a file of its name.
	tell := func(what, who string) string {
		return fmt.Sprintf(`cd %s; test ! -e fail-%s || exit 3; echo "%[2]s $%s $TENURE_TOKEN $(date +%%s)000000000" >>log`, s.dir, what, who)
	}
	fail := func(what string) string { return filepath.Join(s.dir, "fail-"+what) }
	count := func(what string) (n int) {
		for _, e := range s.events(t) {
			if e.what+" "+e.holder == what {
				n++
			}
		}
		return n
	}
	a := s.start(t, "a", append([]string{
		"--fence", tell("fence", "TENURE_PREDECESSOR"), "--peers", "a,b,c", "--fence-every", "100ms",
		"--unfence", tell("unfence", "TENURE_HOLDER"), "--unfence-every", "100ms",
	}, s.service(t)...)...)
	s.awaitStart(t, 0)
	eventually(t, soon, "all are told again and again", func() bool {
		return count("unfence a") > 2 && count("fence b") > 2 && count("fence c") > 2
	})
	if count("fence a") > 0 {
		t.Error("it has fenced itself")
	}

	// A failure to fence is logged once, and one to unfence ends the term.
	if err := os.WriteFile(fail("fence"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	a.awaitLog(t, "peer b: exit status 3")
	unfenced := count("unfence a")
	eventually(t, soon, "it works on", func() bool { return count("unfence a") > unfenced+2 })
	if n := strings.Count(a.log(), "failed to fence again"); n > 2 || // it may begin in the middle
		len(s.starts(t)) != 1 || s.has(t, "stop") {
		t.Errorf("it has failed to fence %d times: %+v", n, s.events(t))
	}
	if err := os.WriteFile(fail("unfence"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "the program is told to end", func() bool { return s.has(t, "stop") })
	a.awaitLog(t, "failed to unfence this replica; giving up the lease")
	if err := os.Remove(fail("unfence")); err != nil {
		t.Fatal(err)
	}

	// A replica that can't be unfenced must not fence those that could take over.
	for _, e := range s.events(t) {
		if e.what == "fence" && !slices.ContainsFunc(s.events(t), func(u event) bool { return u.what == "unfence" && u.token == e.token }) {
			t.Errorf("in the term %d it has fenced %s and was not unfenced", e.token, e.holder)
		}
	}

	// Nothing starts before all peers are fenced in the same term.
	a.awaitLog(t, "failed to fence the peers; giving up the lease")
	if n := len(s.starts(t)); n != 1 {
		t.Errorf("it was started %d times", n)
	}
	if err := os.Remove(fail("fence")); err != nil {
		t.Fatal(err)
	}
	s.awaitStart(t, 1)
	order := []string{"unfence a", "fence b", "fence c", "start a"}
	for _, start := range s.starts(t) {
		var came []string
		for _, e := range s.events(t) {
			if e.token == start.token && !slices.Contains(came, e.what+" "+e.holder) {
				came = append(came, e.what+" "+e.holder)
			}
		}
		if len(came) < len(order) || !slices.Equal(came[:len(order)], order) {
			t.Errorf("in the term %d came %q, want %q first", start.token, came, order)
		}
	}
	a.signal(t, syscall.SIGTERM)
	a.awaitExit(t)
	if ended := len(s.events(t)); !slices.ContainsFunc(s.events(t)[ended-3:], func(e event) bool { return e.what == "stop" }) {
		t.Errorf("after the end there was %+v", s.events(t)[ended-3:])
	}
}

func TestAnUnfenceThatHangsGivesTheLeaseUp(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	hung := filepath.Join(s.dir, "hung")
	unfence := fmt.Sprintf("test -e %s || { touch %[1]s; sleep 20; }", hung) // the second time it returns
	r := s.start(t, "a", append([]string{"--unfence", unfence}, s.service(t)...)...)
	began := time.Now()
	s.awaitStart(t, 0)
	if took := time.Since(began); took < testTTL || took > 18*time.Second {
		t.Errorf("it took %v, want the TTL and a pause", took)
	}
	r.awaitLog(t, "failed to unfence this replica; giving up the lease")
	r.awaitLog(t, "--unfence: killed: it has not returned within 3s")
}

func TestAPredecessorWithAnyNameIsFenced(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		for name, want := range map[string]string{
			"host\x00b":                        "host\uFFFDb",
			strings.Repeat("long ", 200<<10/5): strings.Repeat("long ", 10),
		} {
			store := s.open(t)
			if err := store.Migrate(t.Context()); err != nil {
				t.Fatal(err)
			}
			record, err := json.Marshal(map[string]any{"holder": name, "term": name, "ttl_ms": 1})
			if err != nil {
				t.Fatal(err)
			}
			_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: defaultType, ID: "svc"}, Payload: record}, tenure.Unconditional())
			if err != nil {
				t.Fatal(err)
			}
			told := filepath.Join(t.TempDir(), "told")
			starts := len(s.starts(t))
			r := s.start(t, "a", append([]string{"--fence", `echo "$TENURE_PREDECESSOR $TENURE_PREDECESSOR_TERM" >` + told}, s.service(t)...)...)
			s.awaitStart(t, starts)
			got, err := os.ReadFile(told)
			if err != nil || !strings.HasPrefix(string(got), want) || len(got) > 10000 {
				t.Errorf("%.20q...: the command was told %.80q..., %d bytes, %v", name, got, len(got), err)
			}
			r.signal(t, syscall.SIGTERM)
			r.awaitExit(t)
		}
	})
}

func TestARestartedReplicaDoesNotFenceItself(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	fenced := filepath.Join(s.dir, "fenced")
	args := append([]string{"--fence", "touch " + fenced}, s.service(t)...)
	first := s.start(t, "a", args...)
	s.awaitStart(t, 0)
	first.signal(t, syscall.SIGKILL)
	s.start(t, "a", args...)
	s.awaitStart(t, 1)
	if _, err := os.Stat(fenced); err == nil {
		t.Error("it was fenced")
	}
}

// Each write is stamped as if the clock stood in 1970: by the record's age, its holder has
// always vanished.
func TestWithMissedRenewalsNoClockDecides(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		if isPostgres(s.store) {
			execSQL(t, connect(t, s.store), `
				CREATE FUNCTION long_ago() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.updated_at_ms := 1; RETURN NEW; END';
				CREATE TRIGGER stamp BEFORE INSERT OR UPDATE ON objects FOR EACH ROW EXECUTE FUNCTION long_ago()`)
		} else {
			execSQLite(t, s.store, `
				CREATE TRIGGER stamp AFTER UPDATE ON objects WHEN NEW.updated_at_ms > 1 BEGIN
					UPDATE objects SET updated_at_ms = 1 WHERE object_type = NEW.object_type AND id = NEW.id;
				END`)
		}
		args := append([]string{"--renew", (testTTL / 3).String(), "--missed", "3"}, s.service(t)...)
		a := s.start(t, "a", args...)
		s.awaitStart(t, 0)
		if h, _ := holding(t, s.open(t)); h.TTL != testTTL || h.Age < time.Hour {
			t.Fatalf("the record is %+v; the test would prove nothing", h)
		}
		b := s.start(t, "b", args...)
		b.awaitLog(t, `msg="lease has another holder"`)
		time.Sleep(2 * testTTL)
		if starts := s.starts(t); len(starts) != 1 {
			t.Fatalf("it was taken from a holder that renews: %+v", starts)
		}
		killed := time.Now()
		a.signal(t, syscall.SIGKILL)
		next := s.awaitStart(t, 1)
		// The last renewal came at most an interval before.
		if after := next.at.Sub(killed); next.holder != "b" || after < testTTL-testTTL/3-100*time.Millisecond {
			t.Errorf("%s took over after %v", next.holder, after)
		}
	})
}

func TestAServiceIsStoppedByItsCommandIfTenureOrItsGuardIsStoppedOrKilled(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	a := s.start(t, "a", s.supervised(t, "a")...)
	s.awaitStart(t, 0)
	b := s.start(t, "b", s.supervised(t, "b")...)
	eventually(t, soon, "b competes", func() bool { return strings.Contains(b.log(), "msg=competing") })
	awaitRenewal(t, s.open(t))
	a.signal(t, syscall.SIGSTOP)
	if next := s.awaitStart(t, 1); next.holder != "b" {
		t.Errorf("%s started it", next.holder)
	}
	a.signal(t, syscall.SIGCONT)

	// The first --stop fails on b.
	if err := os.WriteFile(filepath.Join(s.dir, "fail-b"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b.signal(t, syscall.SIGTERM)
	if status := b.awaitExit(t); status != 0 {
		t.Errorf("b exited with %d", status)
	}
	if next := s.awaitStart(t, 2); next.holder != "a" {
		t.Errorf("%s started it", next.holder)
	}
	b.awaitLog(t, "--stop command failed; retrying")

	// If the guard is gone, tenure stops the service, and competes again.
	if err := syscall.Kill(a.pid(t, "guard"), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.awaitStart(t, 3)
	a.signal(t, syscall.SIGKILL)
	eventually(t, soon, "the guard stops the service", s.idle)
}

func TestOnLossKillKillsAServiceAndThenRunsItsStop(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("on this system what has left the group of --start is not found")
	}
	s := sqliteSite(t)
	how := filepath.Join(s.dir, "how")
	said := func() string { data, _ := os.ReadFile(how); return strings.Join(strings.Fields(string(data)), " ") }
	start := func(slowly string) *replica {
		os.Remove(how)
		flags := s.supervised(t, "a", "--on-loss", "kill", "--stop-timeout", "200ms")
		flags[3] = fmt.Sprintf(`test "$TENURE_STOP" = kill || { %s; }; echo ${TENURE_STOP:-stop} >>%s; %s`, slowly, how, flags[3])
		return s.start(t, "a", flags...)
	}
	r := start("true")
	s.awaitStart(t, 0)
	r.signal(t, syscall.SIGKILL)
	eventually(t, soon, "--stop is run", func() bool { return s.idle() && said() == "stop kill" })
	if s.has(t, "stop") {
		t.Error("it was told to end")
	}

	// Without a loss, --stop has as long as it takes.
	r = start("sleep 1")
	s.awaitStart(t, 1)
	r.signal(t, syscall.SIGTERM)
	if status := r.awaitExit(t); status != 0 || said() != "stop stop" || !s.has(t, "stop") {
		t.Errorf("exit status %d, --stop was run as %q", status, said())
	}

	// A --stop that hangs is killed when the lease is lost.
	r = start("test ! -e " + how + " || { touch " + how + "-hangs; sleep 1000; }")
	s.awaitStart(t, 2)
	r.signal(t, syscall.SIGTERM)
	eventually(t, soon, "--stop hangs", func() bool { _, err := os.Stat(how + "-hangs"); return err == nil })
	r.signal(t, syscall.SIGKILL)
	eventually(t, soon, "--stop is run again", func() bool { return s.idle() && said() == "stop kill" })
	if s.has(t, "stop") {
		t.Error("it was told to end")
	}
}

func TestOnLossKillHoldsForAServiceWhoseGuardIsGone(t *testing.T) {
	t.Parallel()
	for name, told := range map[string]bool{"in a term": false, "while tenure ends": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sqliteSite(t)
			hangs, killed := filepath.Join(s.dir, "hangs"), filepath.Join(s.dir, "killed")
			exists := func(name string) bool { _, err := os.Stat(name); return err == nil }
			// The first --stop of the service hangs until it has to kill.
			flags := s.supervised(t, "a", "--on-loss", "kill", "--ttl", "10s")
			flags[3] = fmt.Sprintf(`cd %s; if test "$TENURE_STOP" = kill; then touch killed; elif test -e pid-a && ! test -e hangs; then touch hangs; sleep 1000; fi; %s`, s.dir, flags[3])
			r := s.start(t, "a", flags...)
			s.awaitStart(t, 0)
			if err := syscall.Kill(r.pid(t, "guard"), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			eventually(t, soon, "--stop hangs", func() bool { return exists(hangs) })
			if told { // the trust in the term ends while --stop hangs
				r.signal(t, syscall.SIGTERM)
				eventually(t, soon, "--stop kills", func() bool { return exists(killed) && s.idle() })
				return
			}
			store := s.open(t)
			awaitRenewal(t, store)
			if exists(killed) {
				t.Error("--stop was killed before the lease was lost")
			}
			eventually(t, soon, "the record is deleted", func() bool {
				h, held := holding(t, store)
				return held && store.DeleteIf(t.Context(), h.Key, tenure.IfVersion(h.Version)) == nil
			})
			eventually(t, soon, "--stop kills", func() bool { return exists(killed) })
		})
	}
}

func TestOnLossKillLeavesNothingBelowTheGuard(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("on this system what has left the group of --stop is not found")
	}
	s := sqliteSite(t)
	left := filepath.Join(s.dir, "left")
	flags := s.supervised(t, "a", "--on-loss", "kill")
	flags[3] += fmt.Sprintf(`; test "$TENURE_STOP" != kill || { setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $! >%s; }`, left)
	r := s.start(t, "a", flags...)
	s.awaitStart(t, 0)
	guard := r.pid(t, "guard")
	r.signal(t, syscall.SIGKILL)
	gone := func(group int) bool { return syscall.Kill(-group, 0) != nil || (knownGroup{id: group}).onlyZombies() }
	eventually(t, soon, "the guard ends", func() bool { return gone(guard) })
	data, err := os.ReadFile(left)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	if !gone(pid) {
		t.Error("a process that --stop has started outlives the guard")
		syscall.Kill(-pid, syscall.SIGKILL)
	}
}

// A --start that goes on after --stop has succeeded would start the service beside that of
// the next holder.
func TestNothingOfAStartOutlivesItsGuard(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]bool{"the first run": true, "a later run": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sqliteSite(t)
			at := func(name string) string { return filepath.Join(s.dir, name) }
			exists := func(name string) bool { _, err := os.Stat(at(name)); return err == nil }
			create := func(name string) {
				t.Helper()
				if err := os.WriteFile(at(name), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			// Only the run that finds the file slow takes long, in a child of its shell.
			start := fmt.Sprintf(`cd %s; touch ran; test -e slow || exit 0; rm slow; sh -c "touch begun; sleep 1.5; touch started; :"; :`, s.dir)
			stop := fmt.Sprintf(`cd %s; test ! -e begun || touch stopped; rm -f started`, s.dir)
			if first {
				create("slow")
			}
			r := s.start(t, "a", "--start", start, "--stop", stop, "--start-every", "100ms")
			if !first {
				eventually(t, soon, "it is started", func() bool { return exists("ran") })
				create("slow")
			}
			eventually(t, soon, "--start is under way", func() bool { return exists("begun") })
			if err := syscall.Kill(r.pid(t, "guard"), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			eventually(t, soon, "--stop is run", func() bool { return exists("stopped") })
			time.Sleep(2 * time.Second)
			if exists("started") {
				t.Error("it has started the service after --stop")
			}
		})
	}
}

func TestAServiceInTheGroupOfItsStartIsLeftToStop(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	exists := func(name string) bool { _, err := os.Stat(filepath.Join(s.dir, name)); return err == nil }
	start := fmt.Sprintf(`cd %s; sh -c 'trap "touch told; exit" TERM; while :; do sleep 0.05; done' >/dev/null 2>&1 & echo $! >%[1]s/pid`, s.dir)
	stop := fmt.Sprintf(`cd %s; test -e pid || exit 0; kill $(cat pid); rm pid; for i in $(seq 100); do test -e told && break; sleep 0.05; done; touch stopped`, s.dir)
	r := s.start(t, "a", "--start", start, "--stop", stop)
	eventually(t, soon, "it is started", func() bool { return exists("pid") })
	time.Sleep(300 * time.Millisecond) // --start returns
	if err := syscall.Kill(r.pid(t, "guard"), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "--stop is run", func() bool { return exists("stopped") })
	if !exists("told") {
		t.Error("the service was killed before --stop could stop it")
	}
}

// serviceScript starts and stops the service as a supervisor would: the service is not a
// descendant of the caller.
const serviceScript = `
command=$1 binary=$2 dir=$3 name=$4
case $command in
start)
	setsid "$binary" service "$dir" >/dev/null 2>&1 </dev/null &
	echo $! >"$dir/pid-$name"
	;;
stop)
	if rm "$dir/fail-$name" 2>/dev/null; then exit 1; fi
	pid=$(cat "$dir/pid-$name" 2>/dev/null) || exit 0
	kill "$pid" 2>/dev/null
	while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done
	rm "$dir/pid-$name"
	;;
esac
`

// supervised returns the flags for a service that is started and stopped by a script.
func (s *site) supervised(t *testing.T, name string, more ...string) []string {
	t.Helper()
	script := filepath.Join(s.dir, "service-"+name+".sh")
	if err := os.WriteFile(script, []byte(serviceScript), 0o600); err != nil {
		t.Fatal(err)
	}
	command := fmt.Sprintf("sh %s %%s %s %s %s", script, testBinary(t), s.dir, name)
	return append([]string{"--start", fmt.Sprintf(command, "start"), "--stop", fmt.Sprintf(command, "stop")}, more...)
}

func TestAServiceThatSomebodyStartsOnAStandbyIsStopped(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	a := s.start(t, "a", s.supervised(t, "a")...)
	s.awaitStart(t, 0)
	b := s.start(t, "b", s.supervised(t, "b", "--stop-every", "100ms")...)
	b.awaitLog(t, `msg="lease has another holder"`)
	for range 2 {
		byHand := exec.Command("sleep", "1000")
		if err := byHand.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- byHand.Wait() }()
		pid := filepath.Join(s.dir, "pid-b")
		if err := os.WriteFile(pid, fmt.Append(nil, byHand.Process.Pid), 0o600); err != nil {
			t.Fatal(err)
		}
		select {
		case <-ended:
		case <-time.After(soon):
			byHand.Process.Kill()
			t.Fatal("it runs on")
		}
		eventually(t, soon, "--stop ends", func() bool { _, err := os.Stat(pid); return err != nil })
	}

	// The holder's own is left alone, and so is that of b when b holds.
	a.signal(t, syscall.SIGTERM)
	a.awaitExit(t)
	if next := s.awaitStart(t, 1); next.holder != "b" {
		t.Errorf("%s started it", next.holder)
	}
	time.Sleep(time.Second)
	if events := s.events(t); events[len(events)-1].what != "start" || len(s.starts(t)) != 2 {
		t.Errorf("the holder's service was stopped: %+v", events)
	}
}

func TestAServiceThatHasEndedIsStartedAgainByItsHolder(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	pids, unfit := filepath.Join(s.dir, "pids"), filepath.Join(s.dir, "unfit")
	started := func() []string {
		data, _ := os.ReadFile(pids)
		return strings.Fields(string(data))
	}
	// It leaves a service alone that runs. The file has the name and the PID of each start.
	start := func(name string) string {
		return fmt.Sprintf("test ! -e %s-%s || exit 3; kill -0 $(cat %[3]s-%[2]s) 2>/dev/null && exit 0; "+
			"setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $! >%[3]s-%[2]s; echo %[2]s $! >>%[3]s", unfit, name, pids)
	}
	replica := func(name string) *replica {
		stop := fmt.Sprintf("kill $(cat %s-%s) 2>/dev/null; rm -f %[1]s-%[2]s", pids, name)
		return s.start(t, name, "--start", start(name), "--stop", stop, "--start-every", "100ms")
	}
	a := replica("a")
	eventually(t, soon, "it is started", func() bool { return len(started()) == 2 })
	replica("b").awaitLog(t, `msg="lease has another holder"`)
	time.Sleep(time.Second)
	if got := started(); len(got) != 2 {
		t.Fatalf("a service that runs was started again: %q", got)
	}
	kill := func(pid string) {
		t.Helper()
		if err := exec.Command("kill", "-KILL", pid).Run(); err != nil {
			t.Fatal(err)
		}
	}
	term := s.view(t).Term
	kill(started()[1])
	eventually(t, soon, "it is started again", func() bool { return len(started()) == 4 })
	if v := s.view(t); started()[2] != "a" || v.Term != term {
		t.Errorf("it was started again by %q, in another term: %+v", started(), v)
	}

	// If that fails, another replica takes over.
	if err := os.WriteFile(unfit+"-a", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, soon, "b starts it", func() bool { return len(started()) == 6 && started()[4] == "b" })
	a.awaitLog(t, "--start: exit status 3")
}

func TestATermBeginsWhenTheStopOfAStandbyHasEnded(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	a := s.start(t, "a", s.supervised(t, "a")...)
	s.awaitStart(t, 0)
	// The --stop of b is nearly always under way.
	log, flags := filepath.Join(s.dir, "commands"), s.supervised(t, "b", "--stop-every", "50ms", "--stop-timeout", "1500ms")
	flags[1] = fmt.Sprintf("echo start >>%s; %s", log, flags[1])
	flags[3] = fmt.Sprintf("echo begin >>%s; sleep 0.3; %s; echo end >>%[1]s", log, flags[3])
	b := s.start(t, "b", flags...)
	b.awaitLog(t, `msg="lease has another holder"`)
	lines := func() []string {
		data, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(string(data))
	}
	eventually(t, soon, "b stops its service again", func() bool { return len(lines()) > 4 && lines()[len(lines())-1] == "begin" })
	a.signal(t, syscall.SIGTERM)
	s.awaitStart(t, 1)
	if all := lines(); slices.Index(all, "start") != len(all)-1 || all[len(all)-2] != "end" {
		t.Errorf("b has run %q", all)
	}
}

// told reports whether a file contains a line.
func (s *site) told(path, line string) bool {
	data, err := os.ReadFile(path)
	return err == nil && slices.Contains(strings.Split(string(data), "\n"), line)
}

func TestALogThatNobodyReadsDoesNotBlock(t *testing.T) {
	t.Parallel()
	for name, sig := range map[string]syscall.Signal{"told to end": syscall.SIGTERM, "killed": syscall.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sqliteSite(t)
			out, in, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			defer in.Close()
			in.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
			if _, err := in.Write(make([]byte, 1<<20)); err == nil {
				t.Fatal("the pipe is not full")
			}
			args := append([]string{"run", "--key", "svc", "--ttl", testTTL.String(), "--store", s.store}, s.service(t, "stubborn")...)
			cmd := exec.Command(testBinary(t), args...)
			cmd.Env = append(environ(), asTenure+"=1")
			cmd.Stderr = in
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			s.awaitStart(t, 0)
			cmd.Process.Signal(sig)
			killed := time.AfterFunc(soon, func() { cmd.Process.Kill() })
			defer killed.Stop()
			if err := cmd.Wait(); err != nil && sig == syscall.SIGTERM {
				t.Errorf("tenure ended with %v", err)
			}
			eventually(t, soon, "nothing of it is left", s.idle)
		})
	}
}
