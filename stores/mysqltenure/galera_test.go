//go:build linux

package mysqltenure_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
	"github.com/tenurelib/tenure/storekit"
	"github.com/tenurelib/tenure/stores/mysqltenure"
	"github.com/tenurelib/tenure/storetest"
)

// startNodes starts a Galera cluster on this machine.
func startNodes(t *testing.T, n int) (nodes []*server) {
	t.Helper()
	needsServer(t)
	if _, err := os.Stat(rig.GaleraProvider); err != nil {
		t.Skip("there is no Galera: install galera-4 and rsync")
	}
	all, err := rig.NewGalera(n)
	require.NoError(t, err)
	for _, node := range all {
		s := &server{node}
		t.Cleanup(s.close)
		require.NoError(t, s.Start(t.Context()))
		nodes = append(nodes, s)
		awaitNodes(t, nodes, len(nodes))
	}
	return nodes
}

// awaitNodes waits until nodes are in a cluster of that size.
func awaitNodes(t *testing.T, nodes []*server, size int) {
	t.Helper()
	for _, s := range nodes {
		db := s.db(t, "admin", "timeout=2s&readTimeout=2s")
		testkit.Await(t, "the node is ready", func() bool {
			var name, ready, is string
			err := errors.Join(db.QueryRow("SHOW STATUS LIKE 'wsrep_ready'").Scan(&name, &ready), db.QueryRow("SHOW STATUS LIKE 'wsrep_cluster_size'").Scan(&name, &is))
			return err == nil && ready == "ON" && is == fmt.Sprint(size)
		})
	}
}

// needsCluster skips a test that takes a cluster of three nodes and a minute.
func needsCluster(t *testing.T) {
	t.Helper()
	if os.Getenv("TENURE_TEST_GALERA") == "" {
		t.Skip("make test-galera runs it")
	}
}

// A cluster of one node behaves like any other, but for certification.
func TestAStoreOnGaleraIsClocklessAndItsFenceWrites(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	node := startNodes(t, 1)[0]
	store := open(t, node, "")
	require.True(t, store.Traits().Clockless)
	var wait int
	require.NoError(t, store.DB().QueryRow("SELECT @@wsrep_sync_wait").Scan(&wait))
	require.Equal(t, 1, wait)
	storetest.Run(t, func(t *testing.T) tenure.Store { return open(t, node, newTable()) })

	t.Run("statements", func(t *testing.T) {
		table := newTable()
		store := open(t, node, table)
		db := node.db(t, "app", "interpolateParams=true")
		runStaleWrites(t, store, store, db, table, races)
		term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "written"}}))
		fence, args, err := store.FenceStatement(term)
		require.NoError(t, err)
		exec1(t, db, fence, args...)
		var fences int
		require.NoError(t, db.QueryRow("SELECT fences FROM "+table+" WHERE id = 'written'").Scan(&fences))
		require.Equal(t, 1, fences, "only what is written is certified")
		fenced, err := store.Fence(term)
		require.NoError(t, err)
		testkit.Put(t, fenced, tenure.Object{Key: widget})
		obj := testkit.Put(t, fenced, tenure.Object{Key: widget, Payload: []byte("x")})
		require.NoError(t, fenced.DeleteIf(t.Context(), widget, tenure.IfVersion(obj.Version)))
		require.NoError(t, db.QueryRow("SELECT fences FROM "+table+" WHERE id = 'written'").Scan(&fences))
		require.Equal(t, 4, fences)
		runFailures(t, node, store, table)
	})
}

func TestAServerThatHasBecomeANodeOfAClusterRefusesTheFenceThatLocks(t *testing.T) {
	t.Parallel()
	testkit.Slow(t)
	node := startNodes(t, 1)[0]
	exec1(t, node.db(t, "admin", ""), "SET GLOBAL wsrep_on = OFF")
	before := node.db(t, "app", "") // its sessions are as those of a server that is alone
	store := openOn(t, before, "")
	require.False(t, store.Traits().Clockless)
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
	fence, args, err := store.FenceStatement(term)
	require.NoError(t, err)
	exec1(t, before, fence, args...)
	exec1(t, node.db(t, "admin", ""), "SET GLOBAL wsrep_on = ON")
	_, err = node.db(t, "app", "").ExecContext(t.Context(), fence, args...)
	require.ErrorContains(t, err, "open the store again")
	require.NotErrorIs(t, tenure.FenceError(err), tenure.ErrLost, "the term stands")
	before.SetMaxIdleConns(-1) // the store connects again
	_, err = store.Get(t.Context(), term.Key())
	require.ErrorIs(t, err, tenure.ErrSetup, "ages of another node's record are by another clock")
	require.ErrorContains(t, err, "open the store again")
}

// anyNode passes each call on to the store of one of the nodes.
type anyNode []*mysqltenure.Store

func (a anyNode) any() *mysqltenure.Store { return a[rand.IntN(len(a))] }

func (a anyNode) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	return a.any().Get(ctx, key)
}

func (a anyNode) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	return a.any().PutIf(ctx, obj, cond)
}

func (a anyNode) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return a.any().DeleteIf(ctx, key, cond)
}

func (a anyNode) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	return a.any().DeleteAndWake(ctx, key, cond)
}

func (a anyNode) List(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
	return a.any().List(ctx, objectType, after, limit)
}

func (a anyNode) Wake(ctx context.Context, key tenure.Key) error { return a.any().Wake(ctx, key) }
func (a anyNode) Watch(key tenure.Key) tenure.Subscription       { return a.any().Watch(key) }
func (a anyNode) Traits() tenure.Traits                          { return a[0].Traits() }
func (a anyNode) Lineage(ctx context.Context) (tenure.Lineage, error) {
	return a[0].Lineage(ctx)
}

func (a anyNode) Fence(guard tenure.Guard) (tenure.Store, error) {
	var all anyNode
	for _, store := range a {
		fenced, err := store.Fence(guard)
		if err != nil {
			return nil, err
		}
		all = append(all, fenced.(*mysqltenure.Store))
	}
	return all, nil
}

func TestOnAClusterOfThreeNodes(t *testing.T) {
	needsCluster(t)
	nodes := startNodes(t, 3)
	t.Run("the store keeps the contract with a writer on each node", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) tenure.Store {
			table, all := newTable(), anyNode(nil)
			for _, node := range nodes {
				all = append(all, open(t, node, table))
			}
			return all
		})
	})
	t.Run("in races no stale write is accepted", func(t *testing.T) {
		table := newTable()
		var stores []*mysqltenure.Store
		for _, node := range nodes {
			stores = append(stores, open(t, node, table))
		}
		testkit.RunConcurrentUpdates(t, func(i int) *mysqltenure.Store { return stores[i%3] })
	})
	t.Run("of forced races no fenced transaction commits after the takeover", func(t *testing.T) { runForcedInCluster(t, nodes) })
	t.Run("replicas follow a node that dies", func(t *testing.T) { runNodesDie(t, nodes) })
	t.Run("a node without a majority refuses", func(t *testing.T) { runMinority(t, nodes) })
}

// runForcedInCluster holds a fenced transaction on the first node before its COMMIT, while the second node takes over.
// The first node does not know of that yet, since its one applier is busy with a large transaction that came before. The order of
// the commits is the order of the third node's binary log.
func runForcedInCluster(t *testing.T, nodes []*server) {
	table := newTable()
	first, second := open(t, nodes[0], table), open(t, nodes[1], table)
	admin := nodes[1].db(t, "admin", "interpolateParams=true")
	exec1(t, admin, "CREATE TABLE ledger (race INT, who VARCHAR(10), id BIGINT AUTO_INCREMENT PRIMARY KEY)")
	exec1(t, admin, "CREATE TABLE bulk (race INT, n INT, PRIMARY KEY (race, n))")
	there := nodes[1].db(t, "app", "interpolateParams=true")
	var committed, refused int
	for n := range races {
		lease := testkit.NewLease(t, first, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: fmt.Sprint(n)}})
		term := testkit.MustAcquire(t, lease)
		testkit.Get(t, second, lease.Key()) // it has arrived
		fence, args, err := first.FenceStatement(term)
		require.NoError(t, err)
		tx, err := first.DB().BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		require.NoError(t, err)
		exec1(t, tx, "INSERT INTO ledger (race, who) VALUES (?, 'fenced')", n)
		exec1(t, tx, fence, args...)

		if n%3 != 0 { // otherwise the first node learns of it at once
			exec1(t, admin, "INSERT INTO bulk SELECT ?, seq FROM seq_1_to_4000", n)
		}
		err = func() error {
			tx, err := there.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if _, err := tx.Exec("UPDATE "+table+" SET payload = 'taken', resource_version = resource_version + 1 WHERE object_type = 'lease' AND id = ?", fmt.Sprint(n)); err != nil {
				return err
			}
			if _, err := tx.Exec("INSERT INTO ledger (race, who) VALUES (?, 'takeover')", n); err != nil {
				return err
			}
			return tx.Commit()
		}()
		require.NoError(t, err)
		if err := tx.Commit(); err == nil {
			committed++
		} else {
			var server *mysql.MySQLError
			require.True(t, errors.As(err, &server) && server.Number == 1213 || strings.Contains(err.Error(), "bad connection"), "%v", err)
			refused++
		}
		_ = tx.Rollback()
	}
	orders := commitOrders(t, nodes[2])
	late := 0
	for n := range races {
		order := orders[fmt.Sprint(n)]
		require.Contains(t, order, "takeover")
		if order == "takeover fenced" {
			late++
		}
	}
	t.Logf("%d forced races: %d transactions committed, %d were refused, %d were late", races, committed, refused, late)
	require.Zero(t, late)
	require.Greater(t, refused, races/2)
}

// commitOrders returns who has written to the ledger for each race, in the order of the node's binary log.
func commitOrders(t *testing.T, node *server) map[string]string {
	t.Helper()
	db := node.db(t, "app", "wsrep_sync_wait=1")
	var rows int
	require.NoError(t, db.QueryRow("SELECT COUNT(*) FROM ledger").Scan(&rows))
	logs, err := filepath.Glob(filepath.Join(node.Dir, "data", "binlog.0*"))
	require.NoError(t, err)
	out, err := rig.MariaDBCommand("mariadb-binlog", append([]string{"--no-defaults", "--base64-output=decode-rows", "-v"}, logs...)...).Output()
	require.NoError(t, err)
	orders, found := make(map[string]string), 0
	insert := regexp.MustCompile(`(?m)^### INSERT INTO .tenure.\..ledger.\n### SET\n###   @1=(\d+)\n###   @2='(\w+)'`)
	for _, match := range insert.FindAllSubmatch(out, -1) {
		orders[string(match[1])] = strings.TrimSpace(orders[string(match[1])] + " " + string(match[2]))
		found++
	}
	require.Equal(t, rows, found)
	return orders
}

func runNodesDie(t *testing.T, nodes []*server) {
	var jobs testkit.Jobs
	const ttl = 5 * time.Second
	table := newTable()
	var all []*testkit.Replica
	for i, node := range nodes {
		all = append(all, testkit.StartReplica(t, &jobs, open(t, node, table), fmt.Sprint(i), ttl))
	}
	holds := func() bool { return testkit.Holder(all...) != nil }
	testkit.Await(t, "one holds", holds)
	for range 2 {
		holder := testkit.Holder(all...)
		var i int
		_, err := fmt.Sscan(holder.Status().Replica, &i)
		require.NoError(t, err)
		_ = nodes[i].End(syscall.SIGKILL)
		testkit.Await(t, "another holds", func() bool { return holds() && testkit.Holder(all...) != holder })
		require.NoError(t, nodes[i].Start(t.Context()))
		awaitNodes(t, nodes, 3)
	}
	require.EqualValues(t, 1, jobs.Most.Load())
	for _, r := range all {
		r.Stop()
	}
}

func runMinority(t *testing.T, nodes []*server) {
	table := newTable()
	alone, other := open(t, nodes[2], table), open(t, nodes[1], table)
	obj := testkit.Put(t, other, tenure.Object{Key: widget})
	testkit.Get(t, alone, widget)
	for _, node := range nodes[:2] {
		testkit.PauseProcess(t, node.process(t))
	}
	var err error
	testkit.Await(t, "the node has no majority", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = alone.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
		return err != nil && strings.Contains(err.Error(), "1047")
	})
	require.False(t, storekit.Refusal(err), "%v", err)
	_, err = alone.Get(t.Context(), widget)
	require.ErrorContains(t, err, "1047")
	for _, node := range nodes[:2] {
		testkit.ResumeProcess(t, node.process(t))
	}
	awaitNodes(t, nodes, 3)
	testkit.Put(t, alone, tenure.Object{Key: widget})
}
