package databases_test

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/shards"
)

var (
	drainSize   = flag.Int("drains.size", 10, "a process that is drained has 100 times as many keys, and 10 times as many rows")
	drainRounds = flag.Int("drains.rounds", 1, "how often a process is drained and undrained")
)

// drainedProcess tells a process of its own which store to use.
const drainedProcess = "TENURE_TEST_DRAINED_PROCESS"

// drainable is a process that takes a lease, shards, keys and rows, and can be drained.
type drainable struct {
	drain  *tenure.Drain
	status func() tenure.Status
	lease  *tenure.Lease
	begun  atomic.Int64 // jobs and funcs
	holds  atomic.Int64
	led    chan time.Time  // when each term's job began
	last   [4]atomic.Int64 // when the last job or func of each kind began
	ended  sync.WaitGroup
	cancel context.CancelFunc
}

// isAll is how many jobs and funcs there are in all.
func isAll() int64 { return int64(1 + 64 + *drainSize*100 + *drainSize*10) }

func startDrainable(t *testing.T, store tenure.Database, name string) *drainable {
	d := &drainable{led: make(chan time.Time, 1000)}
	ctx, cancel := context.WithCancel(context.Background())
	d.cancel = cancel
	d.drain = testkit.Must(tenure.NewDrain(store, name, testkit.Quiet))
	d.lease = testkit.NewLease(t, store, tenure.LeaseConfig{Holder: name})
	work := func(ctx context.Context, kind int) error {
		d.last[kind].Store(time.Now().UnixNano())
		d.begun.Add(1)
		d.holds.Add(1)
		<-ctx.Done()
		d.holds.Add(-1)
		return context.Cause(ctx)
	}
	coordinator := testkit.Must(tenure.NewCoordinator(d.lease, tenure.CoordinatorConfig{Drain: d.drain, Reconcile: func(ctx context.Context) error {
		d.led <- time.Now()
		return work(ctx, 0)
	}}))
	d.status = coordinator.Status
	session := testkit.Must(claims.NewSession(store, claims.SessionConfig{Holder: name, Drain: d.drain, Logger: testkit.Quiet}))
	keys := testkit.Must(claims.NewKeys(session, "tenant"))
	worker := testkit.Must(claims.NewWorker(session, testkit.Must(claims.NewQueue(store, drainedRows))))
	member := testkit.Must(shards.New(session, shards.Config{Kind: "shard", Count: 64, Work: func(ctx context.Context, _ string) error { return work(ctx, 1) }}))
	d.ended.Go(func() { _ = d.drain.Run(ctx) })
	d.ended.Go(func() { _ = coordinator.Run(ctx) })
	d.ended.Go(func() { _ = session.Run(ctx) })
	d.ended.Go(func() { _ = member.Run(ctx) })
	d.ended.Go(func() {
		_ = worker.Serve(ctx, *drainSize*10, func(ctx context.Context, _ claims.Claim) error { return work(ctx, 3) })
	})
	d.ended.Go(func() {
		ids := make([]string, *drainSize*100)
		for i := range ids {
			ids[i] = strconv.Itoa(i)
		}
		for ctx.Err() == nil {
			got, _ := keys.Claim(ctx, ids...)
			for _, c := range got {
				d.ended.Go(func() { _ = keys.Do(context.Background(), c, func(ctx context.Context) error { return work(ctx, 2) }) })
			}
		}
	})
	t.Cleanup(func() { cancel(); d.ended.Wait() })
	return d
}

var drainedRows = claims.QueueConfig{Table: "letters", Done: "sent = true", Logger: testkit.Quiet}

// A process of its own is drained while another one stands by, and undrained, again and again. The times are in the log.
func TestADrainedProcessGivesAllToAnother(t *testing.T) {
	testkit.Slow(t)
	if at := os.Getenv(drainedProcess); at != "" {
		store := openAt(t, at)
		d := startDrainable(t, store, "drained")
		go func() {
			for at := range d.led {
				fmt.Println("leads", at.UnixNano())
			}
		}()
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			fmt.Println("holds", d.holds.Load(), "begun", d.begun.Load(), "drained", d.status().StandsDown)
		}
		return
	}
	t.Run("postgres", func(t *testing.T) {
		url := testkit.PostgresURL(t)
		testkit.ExecPostgres(t, testkit.PostgresPool(t, url), `CREATE TABLE letters (id integer PRIMARY KEY, sent bool NOT NULL DEFAULT false); `+
			testkit.Must(drainedRows.PostgresDDL())+fmt.Sprintf(`INSERT INTO letters (id) SELECT generate_series(1, %d)`, *drainSize*10))
		drainAgainAndAgain(t, url)
	})
	t.Run("sqlite", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "tenure.db")
		db := testkit.OpenSQL(t, "sqlite", "file:"+path)
		testkit.ExecSQL(t, db, `CREATE TABLE letters (id integer PRIMARY KEY, sent integer NOT NULL DEFAULT 0)`)
		testkit.ExecSQL(t, db, testkit.Must(drainedRows.SQLiteDDL()))
		for i := range *drainSize * 10 {
			testkit.ExecSQL(t, db, `INSERT INTO letters (id) VALUES (?)`, i)
		}
		drainAgainAndAgain(t, path)
	})
}

func openAt(t *testing.T, at string) tenure.Database {
	if strings.HasPrefix(at, "postgres") {
		return testkit.OpenPostgres(t, at, tenure.PostgresConfig{})
	}
	return testkit.OpenSQLite(t, at)
}

// child is the process that is drained.
type child struct {
	t    *testing.T
	ask  func() (holds, begun int64, drained bool)
	lead chan time.Time
}

func startChild(t *testing.T, at string) *child {
	cmd := exec.Command(os.Args[0], "-test.run", "^TestADrainedProcessGivesAllToAnother$", "-drains.size", strconv.Itoa(*drainSize))
	cmd.Env = append(os.Environ(), drainedProcess+"="+at)
	in, out := testkit.Must(cmd.StdinPipe()), testkit.Must(cmd.StdoutPipe())
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() })
	c, answers := &child{t: t, lead: make(chan time.Time, 1000)}, make(chan string)
	go func() {
		defer close(answers)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if at, ok := strings.CutPrefix(lines.Text(), "leads "); ok {
				n, _ := strconv.ParseInt(at, 10, 64)
				c.lead <- time.Unix(0, n)
			} else {
				answers <- lines.Text()
			}
		}
	}()
	c.ask = func() (holds, begun int64, drained bool) {
		fmt.Fprintln(in)
		_, err := fmt.Sscanf(<-answers, "holds %d begun %d drained %v", &holds, &begun, &drained)
		require.NoError(t, err)
		return holds, begun, drained
	}
	return c
}

func drainAgainAndAgain(t *testing.T, at string) {
	ops := openAt(t, at)
	testkit.MigrateClaims(t, ops)
	a := startChild(t, at)
	testkit.Await(t, "the process has all", func() bool { n, _, _ := a.ask(); return n == isAll() })
	<-a.lead
	b := startDrainable(t, openAt(t, at), "standby")
	b.drain.AwaitMark(t.Context())
	for range *drainRounds {
		testkit.Await(t, "the standby has its half of the shards", func() bool { return b.holds.Load() == 32 })
		began := time.Now()
		require.NoError(t, tenure.SetDrain(t.Context(), ops, tenure.Drained{Replica: "drained", Left: time.Hour}))
		<-b.led
		testkit.Await(t, "the standby has all", func() bool { return b.holds.Load() == isAll() })
		t.Logf("drained: another has %s", b.since(began))
		n, before, drained := a.ask()
		require.True(t, drained)
		require.Zero(t, n)

		b.giveAll(t) // each is a chance for the process that is drained
		n, begun, _ := a.ask()
		require.Zero(t, n)
		require.Equal(t, before, begun)

		require.NoError(t, b.drain.Start(t.Context())) // nobody has anything
		began = time.Now()
		require.NoError(t, tenure.ClearDrain(t.Context(), ops, "drained"))
		leads := <-a.lead
		testkit.Await(t, "the process has all", func() bool { n, _, _ := a.ask(); return n == isAll() })
		t.Logf("undrained: it leads after %v, and has all after %v", leads.Sub(began).Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
		b.drain.Stop()
	}
}

// giveAll drains a process for a moment.
func (d *drainable) giveAll(t *testing.T) {
	began := time.Now()
	require.NoError(t, d.drain.Start(t.Context()))
	gone := time.Now()
	require.Zero(t, d.holds.Load())
	d.drain.Stop()
	<-d.led
	testkit.Await(t, "the process has all again", func() bool { return d.holds.Load() == isAll() })
	t.Logf("Start returns after %v; after Stop, the process has %s", gone.Sub(began).Round(time.Millisecond), d.since(gone))
}

// since tells how long after an instant the last job or func of each kind began.
func (d *drainable) since(began time.Time) (text string) {
	for i, what := range []string{"the lease", "64 shards", "the keys", "the rows"} {
		text += fmt.Sprintf("%s after %v, ", what, time.Unix(0, d.last[i].Load()).Sub(began).Round(time.Millisecond))
	}
	return strings.TrimSuffix(text, ", ")
}
