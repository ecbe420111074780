package kills

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/proctree"
	"github.com/tenurelib/tenure/internal/testkit"
)

var (
	killsFlag = flag.Int("kills", 30, "how many processes under a witness are killed on each store")
	early     = flag.Bool("kills.early", false, "release when the signal was sent and not when the process is dead, to see the test fail")
	unfenced  = flag.Bool("kills.unfenced", false, "have another process write a moment later, without a fence, to see the test fail")
)

const (
	parties = 4               // processes that compete at a time
	limit   = 5 * time.Minute // of a look, which only a broken server exceeds
)

// judge has seen what the processes did.
type judge struct {
	*testing.T
	store    testkit.FencingStore
	url, dir string

	mu        sync.Mutex
	kills     map[string]int       // by what they were aimed at
	dead      map[string]time.Time // since when
	said      map[string]int       // by the first word
	left, bad int
	reported  map[int64]bool // by version
	writes    sync.WaitGroup // without a fence
}

// Run kills -kills processes that compete in a store with this URL, and judges what they and their witnesses did. The
// processes play in [Play].
func Run(t *testing.T, store testkit.FencingStore, url string) {
	j := &judge{T: t, store: store, url: url, dir: t.TempDir(), kills: make(map[string]int), dead: make(map[string]time.Time), said: make(map[string]int), reported: make(map[int64]bool)}
	began := time.Now()
	var all sync.WaitGroup
	for party := range parties {
		all.Go(func() {
			for i := party; i < *killsFlag && j.bad < 20; i += parties {
				j.one(fmt.Sprint("victim-", i))
			}
		})
	}
	all.Wait()
	j.writes.Wait()
	t.Logf("kills %d in %v: %s\nwhat the processes began: %s\noverlaps %d, left to the TTL %d, fenced writes too late %d",
		len(j.dead), time.Since(began).Round(time.Second), testkit.FormatCounts(j.kills), testkit.FormatCounts(j.said), j.said["OVERLAPS"], j.left, j.said["LATE"])
	require.Greater(t, j.said["job"], len(j.dead)/2, "too little happened")
}

// one runs a program under a witness, and kills it at some instant.
func (j *judge) one(name string) {
	aim := aims[rand.N(len(aims))]
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"=witness", urlEnv+"="+j.url, dirEnv+"="+j.dir, nameEnv+"="+name, aimEnv+"="+aim.at)
	if *unfenced {
		cmd.Env = append(cmd.Env, unfencedEnv+"=1")
	}
	var log bytes.Buffer
	cmd.Stderr = &log
	out, in, err := os.Pipe()
	require.NoError(j, err)
	cmd.Stdout = in
	require.NoError(j, cmd.Start())
	in.Close()
	now, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		begun := sync.OnceFunc(func() { close(now) })
		defer begun()
		for lines := bufio.NewScanner(out); lines.Scan(); {
			word, rest, _ := strings.Cut(lines.Text(), " ")
			switch word {
			case "now":
				begun()
				continue
			case "write":
				j.writes.Go(func() { j.writeLate(rest) })
				continue
			}
			j.mu.Lock()
			j.said[word]++
			j.mu.Unlock()
			if strings.ToUpper(word) == word { // a complaint
				j.wrong("%s: %s", name, lines.Text())
			}
		}
	}()
	if aim.at != "start" {
		<-now
	}
	time.Sleep(rand.N(aim.within))
	j.kill(cmd.Process.Pid)
	died := time.Now()
	if *early {
		j.releaseEarly(name)
	}
	<-ended // that is when all who could write to the pipe are dead
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 128+int(syscall.SIGKILL) {
		j.wrong("%s: the witness ended with %v: %s", name, err, log.String())
	}
	j.mu.Lock()
	j.kills[aim.at]++
	j.dead[name] = died
	j.mu.Unlock()
	j.look(name, log.String)
}

// kill kills a witness's program, or its group, or all processes under the witness one after the other.
func (j *judge) kill(witness int) {
	for how := rand.N(3); ; time.Sleep(100 * time.Microsecond) { // it may not have begun, or not have its group yet
		all := proctree.Descendants(witness)
		rand.Shuffle(len(all), func(a, b int) { all[a], all[b] = all[b], all[a] })
		killed := false
		for _, p := range all {
			isProgram := p.Parent == witness
			switch {
			case how == 1 && isProgram:
				killed = syscall.Kill(-p.PID, syscall.SIGKILL) == nil
			case how == 2 || isProgram:
				killed = syscall.Kill(p.PID, syscall.SIGKILL) == nil && isProgram || killed
			}
		}
		if p, ok := proctree.Read(witness); killed || !ok || p.Ended {
			return
		}
	}
}

// look requires that no record is a dead process's: its witness has ended.
func (j *judge) look(name string, log func() string) {
	keys := make([]tenure.Key, leases)
	for i := range keys {
		keys[i] = leaseKey(i)
	}
	ctx, cancel := context.WithTimeout(j.Context(), limit)
	defer cancel()
	sessions, err := j.store.(tenure.Lister).List(ctx, objects.SessionType, "", 1000)
	if err != nil {
		j.wrong("look for sessions: %v", err)
	}
	for _, s := range sessions {
		keys = append(keys, s.Key)
	}
	j.mu.Lock()
	dead := maps.Clone(j.dead) // whoever is released after this look has begun may still be seen
	j.mu.Unlock()
	for _, key := range keys {
		obj, err := j.store.Get(ctx, key)
		var record struct{ Holder string } // empty in an offer
		if err == nil {
			err = json.Unmarshal(obj.Payload, &record)
		}
		if err != nil {
			testkit.WantErr(j, err, tenure.ErrNotFound)
			continue
		}
		j.mu.Lock()
		died, isLeft := dead[record.Holder]
		if isLeft = isLeft && !j.reported[obj.Version]; isLeft {
			j.reported[obj.Version] = true // until it has expired it will be found again
			j.left++
		}
		j.mu.Unlock()
		if isLeft {
			j.wrong("%v, written %v after the kill, is still the dead %s's when the witness of %s has ended: %s: %s",
				key, obj.UpdatedAt.Sub(died), record.Holder, name, obj.Payload, log())
		}
	}
}

// releaseEarly releases what names the witness of a process, as one would that is content with the signal.
func (j *judge) releaseEarly(name string) {
	for i := range leases {
		obj, err := j.store.Get(j.Context(), leaseKey(i))
		var record struct{ Holder, Witness string }
		if err == nil && json.Unmarshal(obj.Payload, &record) == nil && record.Holder == name {
			_, _ = testkit.NewLease(j, j.store, tenure.LeaseConfig{Key: obj.Key}).ReleaseDead(j.Context(), record.Witness, 0)
		}
	}
}

// writeLate does a write of a process that is perhaps dead, as a server does to which that has sent a request.
func (j *judge) writeLate(what string) {
	time.Sleep(rand.N(50 * time.Millisecond))
	id, token, _ := strings.Cut(what, " ")
	_, _ = j.store.PutIf(j.Context(), tenure.Object{Key: widgetKey(id), Payload: []byte(token)}, tenure.Unconditional())
}

func (j *judge) wrong(format string, args ...any) {
	j.Errorf(format, args...)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.bad++
}

func lockFile(dir string, id string) (*os.File, error) {
	return os.OpenFile(filepath.Join(dir, id), os.O_CREATE|os.O_RDWR, 0o600)
}
