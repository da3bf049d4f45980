// Go with the stubs that protoc-gen-go makes of the repository's protos: whole answers, streams, cancels, errors.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-project/weft/protos"
)

var client weftv1.InferenceClient

func request(maxTokens uint32, temperature float32) *weftv1.GenerateRequest {
	return &weftv1.GenerateRequest{
		Model:    os.Getenv("WEFT_MODEL"),
		Prompt:   &weftv1.Prompt{Form: &weftv1.Prompt_Text{Text: "Once upon a time"}},
		Sampling: &weftv1.Sampling{MaxTokens: &maxTokens, Temperature: &temperature},
	}
}

func streamed(ctx context.Context) error {
	whole, err := client.Complete(ctx, request(16, 0))
	if err != nil {
		return err
	}
	stream, err := client.Generate(ctx, request(16, 0))
	if err != nil {
		return err
	}
	var text strings.Builder
	var receipt *weftv1.Receipt
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		text.WriteString(message.GetDelta().GetText())
		receipt = message.GetReceipt()
	}
	if text.String() != whole.Choices[0].Text || receipt.GetCompletionTokens() != 16 {
		return fmt.Errorf("streamed %q, not %q", text.String(), whole.Choices[0].Text)
	}
	return nil
}

func cancelled(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := client.Generate(ctx, request(1500, 1))
	if err != nil {
		return err
	}
	if _, err := stream.Recv(); err != nil {
		return err
	}
	cancel()
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Canceled {
		return fmt.Errorf("ended with %w", err)
	}
	return nil
}

func refused(ctx context.Context) error {
	_, err := client.Complete(ctx, request(16, -1))
	if status.Code(err) != codes.InvalidArgument {
		return fmt.Errorf("ended with %w", err)
	}
	for _, detail := range status.Convert(err).Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok && bad.FieldViolations[0].Field == "sampling.temperature" {
			return nil
		}
	}
	return fmt.Errorf("no detail names the field: %w", err)
}

func main() {
	// Deprecated names, which the oldest packaged version has, too; new code calls grpc.NewClient.
	connection, err := grpc.Dial(os.Getenv("WEFT_GRPC"), grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client = weftv1.NewInferenceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	names := []string{"streamed", "cancelled", "refused"}
	for place, story := range []func(context.Context) error{streamed, cancelled, refused} {
		if err := story(ctx); err != nil {
			log.Fatalf("%s: %v", names[place], err)
		}
		fmt.Println(names[place])
	}
}
