package storetest_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// Here an answer is lost: the write happened, but its caller got an error. A retry has
// to find out that the object exists already.
func ExampleFaulty() {
	ctx := context.Background()
	store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
		err := do(ctx)
		if call.Op == "put" {
			return errors.New("connection reset")
		}
		return err
	})
	obj := tenure.Object{Key: tenure.Key{Type: "sandbox", ID: "one"}, Payload: []byte("ready")}
	_, err := store.PutIf(ctx, obj, tenure.IfAbsent())
	fmt.Println("create:", err)

	store.SetHook(nil)
	_, err = store.PutIf(ctx, obj, tenure.IfAbsent())
	fmt.Println("create again:", err)
	// Output:
	// create: connection reset
	// create again: storetest: put sandbox/one: object exists already
}
