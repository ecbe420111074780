package kills

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/witness"
)

const (
	roleEnv = "KILLS_ROLE"
	urlEnv  = "KILLS_URL"
	dirEnv  = "KILLS_DIR" // of the locks
	nameEnv = "KILLS_NAME"
	aimEnv  = "KILLS_AIM"

	unfencedEnv = "KILLS_UNFENCED"

	leases = 6
	keys   = 4
	kind   = "tenant"

	ttl           = 30 * time.Second
	patience      = 20 * time.Second // of a witness, if the machine is busy; below the TTL
	renewInterval = 20 * time.Millisecond
)

// aims are what kills are aimed at: they come within a time from it.
var aims = []struct {
	at     string
	within time.Duration
}{
	{"start", 80 * time.Millisecond}, // of the witness; the program follows
	{"acquire", 20 * time.Millisecond},
	{"renewal", 60 * time.Millisecond},
	{"commit", 3 * time.Millisecond},
	{"claim", 5 * time.Millisecond},
	{"anything", 400 * time.Millisecond},
}

// Play plays a process of [Run], and does not return, if this process is to be one. Call it first in TestMain.
func Play(open func(ctx context.Context, url string) (testkit.FencingStore, error)) {
	switch os.Getenv(roleEnv) {
	case "":
		return
	case "witness":
		os.Setenv(roleEnv, "program")
		status, err := witness.Run(witness.Config{Young: -1, ReleaseTimeout: patience, Open: func(ctx context.Context) (tenure.Store, error) {
			return open(ctx, os.Getenv(urlEnv))
		}}, "/proc/self/exe")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(status)
	}
	fmt.Println("ERROR", program(open)) // it returns for no other reason
	select {}                           // until it is killed
}

// victim works for leases and claims until it is killed.
type victim struct {
	store testkit.FencingStore
	locks map[string]*os.File
	now   func(what string) // says that a kill is due, if it is
}

func program(open func(ctx context.Context, url string) (testkit.FencingStore, error)) error {
	v := &victim{locks: make(map[string]*os.File)}
	var before atomic.Int32
	before.Store(rand.N[int32](8))
	v.now = func(what string) {
		if os.Getenv(aimEnv) == what && before.Add(-1) == -1 {
			fmt.Println("now")
		}
	}
	if os.Getenv(aimEnv) == "anything" {
		fmt.Println("now")
	}
	helper := exec.Command("sleep", "1000")                 // it has the locks too: the program's death alone must not be enough
	helper.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // nor that of its group
	for i := range leases + keys {
		id := fmt.Sprint("lease-", i)
		if i >= leases {
			id = fmt.Sprint("key-", i-leases)
		}
		lock, err := lockFile(os.Getenv(dirEnv), id)
		if err != nil {
			return err
		}
		v.locks[id] = lock
		helper.ExtraFiles = append(helper.ExtraFiles, lock)
	}
	if rand.N(3) == 0 {
		if err := helper.Start(); err != nil {
			return err
		}
	}
	ballast := bytes.Repeat([]byte{1}, rand.N(8)/7*128<<20) // with that, the kernel takes a while to end it
	defer runtime.KeepAlive(ballast)
	ctx := context.Background()
	var err error
	if v.store, err = open(ctx, os.Getenv(urlEnv)); err != nil {
		return err
	}
	for i := range leases {
		v.now("acquire")
		if err := v.compete(ctx, i); err != nil {
			return err
		}
	}
	return v.claim(ctx)
}

func leaseKey(i int) tenure.Key { return tenure.Key{Type: "lease", ID: fmt.Sprint("lease-", i)} }

func widgetKey(id string) tenure.Key { return tenure.Key{Type: "widget", ID: id} }

// compete competes for a lease, whose jobs are short.
func (v *victim) compete(ctx context.Context, i int) error {
	lease, err := tenure.NewLease(v.store, tenure.LeaseConfig{Key: leaseKey(i), Holder: os.Getenv(nameEnv), TTL: ttl, Logger: testkit.Quiet})
	if err != nil {
		return err
	}
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{RenewInterval: renewInterval, AcquireInterval: renewInterval,
		Reconcile: func(ctx context.Context) error {
			defer v.now("acquire") // the next one, after the release
			v.now("renewal")       // which will be soon
			term := tenure.TermFromContext(ctx)
			if !term.Witnessed() {
				fmt.Println("UNWITNESSED", lease.Key().ID)
			}
			return v.job(ctx, "job", lease.Key().ID, term.Token(), func() (tenure.Store, error) { return v.store.Fence(term) })
		}})
	if err == nil {
		go c.Run(ctx)
	}
	return err
}

// claim claims keys, where the store has a place for claims, for short funcs.
func (v *victim) claim(ctx context.Context) error {
	if _, ok := v.store.(tenure.Database); !ok {
		for ; ; time.Sleep(rand.N(10 * time.Millisecond)) {
			v.now("claim") // another instant like any other
		}
	}
	session, err := claims.NewSession(v.store, claims.SessionConfig{Holder: os.Getenv(nameEnv), TTL: ttl, RenewInterval: renewInterval, Logger: testkit.Quiet})
	if err != nil {
		return err
	}
	all, err := claims.NewKeys(session, kind)
	if err != nil {
		return err
	}
	go session.Run(ctx)
	for {
		v.now("claim")
		got, err := all.Claim(ctx, fmt.Sprint("key-", rand.N(keys)))
		if err != nil {
			return err
		}
		for _, c := range got {
			err := all.Do(ctx, c, func(ctx context.Context) error {
				return v.job(ctx, "claim", c.Key.ID, c.Token, func() (tenure.Store, error) { return v.store.Fence(c) })
			})
			if err != nil {
				return err
			}
		}
	}
}

// job writes until it is over. Two jobs must not overlap, and no former one's write may come after it has begun. For both
// it looks at what no clock decides: a lock that the kernel frees when all who have it are dead, and versions.
func (v *victim) job(ctx context.Context, what, id string, token int64, fence func() (tenure.Store, error)) error {
	lock := int(v.locks[id].Fd())
	if err := syscall.Flock(lock, syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		fmt.Println("OVERLAPS", what, id)
		return nil
	}
	defer syscall.Flock(lock, syscall.LOCK_UN)
	fmt.Println(what)
	store, err := fence()
	if err != nil {
		fmt.Println("ERROR", err)
		return nil
	}
	widget := tenure.Object{Key: widgetKey(id), Payload: fmt.Append(nil, token)}
	for end := time.Now().Add(rand.N(100 * time.Millisecond)); ctx.Err() == nil && time.Now().Before(end); testkit.Sleep(ctx, rand.N(5*time.Millisecond)) {
		is, err := v.store.Get(ctx, widget.Key)
		var by int64
		if err == nil {
			_ = json.Unmarshal(is.Payload, &by)
		}
		if by < token && is.Version > token {
			fmt.Println("LATE", what, id, by, is.Version, token)
		}
		if err != nil && !errors.Is(err, tenure.ErrNotFound) {
			continue
		}
		v.now("commit")
		if os.Getenv(unfencedEnv) != "" {
			fmt.Println("write", id, token)
			continue
		}
		_, err = store.PutIf(ctx, widget, tenure.Unconditional())
		if err != nil && ctx.Err() == nil && !errors.Is(err, objects.ErrLost) {
			fmt.Println("ERROR", err)
		}
	}
	return nil
}
